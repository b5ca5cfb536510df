// decode.mjs RECORDING TURNS: what @tanstack/ai-claude-code makes of the lines of a
// run of so many tool turns. Prints {"events","lines","seconds","maxRSS"}; the lines
// are those that the Go side makes for itself.
import { readFileSync } from 'node:fs'
import { translateSdkStream } from '@tanstack/ai-claude-code'
import { maxRSS } from './memory.mjs'

const [recording, turns] = [process.argv[2], Number(process.argv[3])]
const hole = '%%%%%%%%'
const raw = readFileSync(recording, 'utf8').replaceAll('toolu_01', 'toolu_' + hole).replaceAll('msg_fake_01', 'msg_' + hole)
const parts = [[], [], []]
let part = 0
for (const line of raw.split('\n')) {
  if (line === '') continue
  if (part === 0 && line.includes('"message_start"')) part = 1
  parts[part].push(line)
  if (line.includes('"tool_result"')) part = 2
}
let lines = 0

// The package gets parsed lines, as its own runner gives them to it.
async function* messages() {
  const give = (line) => (lines++, JSON.parse(line))
  for (const line of parts[0]) yield give(line)
  for (let i = 0; i < turns; i++) {
    const id = String(i).padStart(hole.length, '0')
    for (const line of parts[1]) yield give(line.replaceAll(hole, id))
  }
  for (const line of parts[2]) yield give(line)
}

let ids = 0
let events = 0
let last
const start = performance.now()
for await (const chunk of translateSdkStream(messages(), { model: 'sonnet', runId: 'run-1', threadId: 'thread-1', genId: () => 'id-' + ids++ })) {
  events++
  last = chunk.type
}
const seconds = (performance.now() - start) / 1000
if (last !== 'RUN_FINISHED') throw new Error('the run ended with ' + last)
console.log(JSON.stringify({ events, lines, seconds, maxRSS: maxRSS() }))
