// Drives the real AG-UI client, which verifies each event, against a server.
//
// argv:   --base URL --path PATH --thread ID --runs ID,ID,…
// stdout: one JSON object a line, {"events", "messages", "error", "warnings"}
import { HttpAgent } from "@ag-ui/client";

const args = Object.fromEntries(
  process.argv.slice(2).join(" ").split("--").filter(Boolean).map((a) => a.trim().split(" ")),
);
const warnings = [];
for (const level of ["warn", "error"]) {
  console[level] = (...a) => warnings.push(a.map(String).join(" "));
}

const agent = new HttpAgent({ url: args.base + args.path, threadId: args.thread });
const out = { events: [], messages: [], error: "", warnings };
for (const [i, runId] of args.runs.split(",").entries()) {
  agent.addMessage({ id: `${runId}-user`, role: "user", content: `turn ${i}` });
  try {
    await agent.runAgent({ runId }, {
      onEvent: ({ event }) => { out.events.push(event.type === "CUSTOM" ? event.name : event.type); },
      onRunErrorEvent: ({ event }) => { out.runError = { message: event.message, code: event.code }; },
      onRunFailed: ({ error }) => { out.error = String(error?.message ?? error); },
    });
  } catch (e) {
    out.error = String(e?.message ?? e);
  }
}
out.messages = agent.messages;
process.stdout.write(JSON.stringify(out) + "\n", () => process.exit(0));
