// memory.mjs: the largest resident set of this process so far, in MB. Not
// process.resourceUsage(), which counts what the parent had when it started us.
import { readFileSync } from 'node:fs'

export function maxRSS() {
  const kb = /^VmHWM:\s+(\d+) kB$/m.exec(readFileSync('/proc/self/status', 'utf8'))
  return (Number(kb[1]) * 1024) / 1e6
}
