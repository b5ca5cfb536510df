// turn.mjs DIR COMMAND: runs turns of one thread with @tanstack/ai, its sandbox
// package and its local-process provider, in the git work tree DIR. COMMAND, shell
// text, reads the prompt and prints what claude would. One turn for each line on
// stdin; for each prints {"first","events","seconds","maxRSS"}: the milliseconds
// from the call of chat() to the first text, the number of events, and of seconds
// until the last one.
import { createInterface } from 'node:readline'
import { chat } from '@tanstack/ai'
import { claudeCodeText } from '@tanstack/ai-claude-code'
import { defineSandbox, defineWorkspace, withSandbox } from '@tanstack/ai-sandbox'
import { localProcessSandbox } from '@tanstack/ai-sandbox-local-process'
import { maxRSS } from './memory.mjs'

const [dir, command] = process.argv.slice(2)
const sandbox = defineSandbox({
  id: 'bench',
  provider: localProcessSandbox({ dir }),
  workspace: defineWorkspace({ source: { type: 'none' } }),
  lifecycle: { reuse: 'thread' },
})
// The adapter puts its flags behind the executable, into a shell; "#" drops them,
// so that no wrapper script has to be paid for.
const adapter = claudeCodeText('sonnet', { claudeExecutable: command + ' #' })

for await (const _ of createInterface({ input: process.stdin })) {
  let first = 0
  let events = 0
  let last
  const start = performance.now()
  const stream = chat({
    threadId: 'bench',
    adapter,
    messages: [{ role: 'user', content: 'say hello' }],
    middleware: [withSandbox(sandbox)],
  })
  for await (const chunk of stream) {
    events++
    last = chunk
    if (first === 0 && chunk.type === 'TEXT_MESSAGE_CONTENT') first = performance.now() - start
  }
  const seconds = (performance.now() - start) / 1000
  if (last?.type !== 'RUN_FINISHED' || first === 0) throw new Error('the run ended with ' + JSON.stringify(last))
  console.log(JSON.stringify({ first, events, seconds, maxRSS: maxRSS() }))
}
