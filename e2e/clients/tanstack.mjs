// Drives the real TanStack chat client against a server.
//
// argv:   --base URL --case NAME --thread ID
// stdout: one JSON object a line, {"case", "messages", "status", "error", "custom", "warnings", …}
import { ChatClient, fetchHttpStream, fetchServerSentEvents } from "@tanstack/ai-client";

const args = Object.fromEntries(
  process.argv.slice(2).join(" ").split("--").filter(Boolean).map((a) => a.trim().split(" ")),
);
const url = `${args.base}/v1/chat/demo`;
const warnings = [];
for (const level of ["warn", "error"]) {
  console[level] = (...a) => warnings.push(a.map(String).join(" "));
}

function until(what, ok, ms = 20_000) {
  const late = Date.now() + ms;
  return new Promise((resolve, reject) => {
    const look = () => {
      if (ok()) return resolve();
      if (Date.now() > late) return reject(new Error(`timeout: ${what}`));
      setTimeout(look, 5);
    };
    look();
  });
}

const custom = [];
let lastError = "";

function client(options = {}) {
  return new ChatClient({
    connection: fetchServerSentEvents(url),
    threadId: args.thread,
    onCustomEvent: (name, value) => custom.push(name === "run.queued" ? `${name} ${value.position}` : name),
    onError: (e) => { lastError = String(e?.message ?? e); },
    ...options,
  });
}

const text = (c) => c.getMessages().flatMap((m) => m.parts).filter((p) => p.type === "text").map((p) => p.content).join("|");
const idle = (c) => !c.getIsLoading() && c.getStatus() !== "streaming" && c.getStatus() !== "submitted";
const run = async (id) => (await fetch(`${args.base}/v1/runs/${id}`)).json();
const cancel = async (body) => (await fetch(`${url}/cancel`, {
  method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body),
})).status;

const cases = {
  async send() {
    const c = client();
    await c.sendMessage("hi");
    return { c };
  },
  async ndjson() {
    const c = client({ connection: fetchHttpStream(url, { headers: { Accept: "application/x-ndjson" } }) });
    await c.sendMessage("hi");
    return { c };
  },
  async turns() {
    const c = client();
    await c.sendMessage("one");
    await c.sendMessage("two");
    return { c };
  },
  // The tab is closed in the middle of a run and opened again.
  async reload() {
    const first = client();
    first.sendMessage("hi").catch(() => {});
    await until("the first words", () => text(first).includes("Reading"));
    const before = first.getMessages();
    first.stop();
    first.dispose();
    custom.length = 0;
    const c = client({ persistence: true });
    c.attach();
    await until("the joined run", () => text(c).includes("Done") && idle(c));
    return { c, before: before.length };
  },
  // Stopping only leaves; the cancel route ends the run.
  async stop() {
    const c = client();
    c.sendMessage("hi").catch(() => {});
    await until("the first words", () => text(c).includes("Reading"));
    const id = c.getCurrentRunId();
    c.stop();
    await until("idle", () => idle(c));
    const left = (await run(id)).status;
    const codes = [await cancel({ threadId: args.thread })];
    let ended;
    const late = Date.now() + 10_000;
    do { ended = await run(id); } while (ended.status === "running" && Date.now() < late);
    codes.push(await cancel({ threadId: args.thread }));
    const log = await (await fetch(`${args.base}/v1/runs/${id}/events`)).text();
    const last = JSON.parse(log.trim().split("\n").at(-1)).chunk;
    return { c, left, codes, ended: ended.status, last: { type: last.type, code: last.code } };
  },
  // An attached viewer sees that somebody else cancelled.
  async cancelled() {
    const c = client();
    const sent = c.sendMessage("hi").catch(() => {});
    await until("the first words", () => text(c).includes("Reading"));
    await cancel({ runId: c.getCurrentRunId() });
    await sent;
    await until("idle", () => idle(c));
    return { c };
  },
  async error() {
    const c = client();
    await c.sendMessage("hi").catch(() => {});
    return { c };
  },
  async rejected() {
    const c = client();
    await c.sendMessage("hi").catch(() => {});
    return { c };
  },
  // A pointer to a run that nobody knows any more.
  async unknown() {
    const c = client({
      initialMessages: [{ id: "u", role: "user", parts: [{ type: "text", content: "hi" }] }],
      initialResumeSnapshot: { resumeState: { threadId: args.thread, runId: "gone" } },
    });
    c.attach();
    await until("idle", () => idle(c));
    return { c, pointer: c.getResumeState() };
  },
  // A second tab sends while the first one's run goes on.
  async queue() {
    const a = client();
    const first = a.sendMessage("one");
    await until("the first words", () => text(a).includes("Reading"));
    custom.length = 0;
    const c = client();
    const second = c.sendMessage("two");
    await until("a place in the line", () => custom.includes("run.queued 1"));
    await fetch(`${args.base}/go`, { method: "POST" });
    await first;
    await second;
    return { c };
  },
};

const out = { case: args.case, messages: [], status: "", error: "", custom, warnings };
try {
  const { c, ...more } = await cases[args.case]();
  await until("idle", () => idle(c));
  Object.assign(out, more, { messages: c.getMessages(), status: c.getStatus(), error: c.getError()?.message ?? lastError });
  c.dispose();
} catch (e) {
  out.failed = String(e?.stack ?? e);
}
process.stdout.write(JSON.stringify(out) + "\n", () => process.exit(0));
