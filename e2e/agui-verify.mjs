// Gives recorded streams to the real AG-UI client and tells what it made of them.
//
// stdin:  one JSON object a line, {"name": …, "runId": …, "sse": the body of a response}
// stdout: one JSON object a line, {"name", "events", "text", "calls", "error", "warnings"}
import { createInterface } from "node:readline";
import { HttpAgent } from "@ag-ui/client";

let warnings = [];
for (const level of ["warn", "error"]) {
  console[level] = (...args) => warnings.push(args.map(String).join(" "));
}

async function verify({ name, runId, sse }) {
  warnings = [];
  const agent = new HttpAgent({
    url: "http://127.0.0.1/unused",
    threadId: "thread-1",
    fetch: async () => new Response(sse, { headers: { "Content-Type": "text/event-stream" } }),
  });
  const out = { name, events: 0, text: "", calls: 0, error: "" };
  try {
    await agent.runAgent(
      { runId },
      {
        onEvent: () => { out.events++; },
        onRunFailed: ({ error }) => { out.error = String(error?.message ?? error); },
      },
    );
  } catch (e) {
    out.error = String(e?.message ?? e);
  }
  for (const m of agent.messages) {
    if (m.role !== "assistant") continue;
    out.text += m.content ?? "";
    out.calls += m.toolCalls?.length ?? 0;
  }
  return { ...out, warnings };
}

for await (const line of createInterface({ input: process.stdin, crlfDelay: Infinity })) {
  process.stdout.write(JSON.stringify(await verify(JSON.parse(line))) + "\n");
}
process.exit(0);
