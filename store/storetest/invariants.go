package storetest

// Invariants are statements over the tables of the SQL stores that find nothing
// in a sound database (spec 04 §24.5), by name.
var Invariants = map[string]string{
	"I3 I4: epochs grow, numbers have no gap": `SELECT run_id FROM (SELECT run_id, seq, epoch, lag(seq) OVER w ps, lag(epoch) OVER w pe FROM run_events
 WINDOW w AS (PARTITION BY run_id ORDER BY seq)) x WHERE (ps IS NULL AND seq<>1) OR seq<>ps+1 OR epoch<pe`,
	"I7: sources follow each other": `SELECT run_id FROM (SELECT run_id, src_off o, src_idx i, lag(src_off) OVER w po, lag(src_idx) OVER w pi FROM run_events WHERE origin=0
 WINDOW w AS (PARTITION BY run_id ORDER BY seq)) x WHERE (po,pi) >= (o,i)`,
	"I4 I10: record and log agree": `SELECT r.run_id FROM runs r LEFT JOIN (SELECT run_id, max(seq) m FROM run_events GROUP BY run_id) e ON e.run_id=r.run_id
 WHERE (r.closed_at IS NULL) <> (r.status='running') OR (r.events_expired=0 AND r.next_seq-1 <> coalesce(e.m,0))`,
	"I7: the watermark is behind no event": `SELECT r.run_id FROM runs r JOIN run_events e ON e.run_id=r.run_id WHERE e.origin=0 AND (e.src_off,e.src_idx) > (r.pos_off,r.pos_idx)`,
	"I11: completed is truthful": `SELECT run_id FROM runs WHERE status='completed' AND kind='sandbox'
 AND NOT coalesce(sentinel_ok=1 AND exit_ok=1 AND exit_code IS NOT NULL AND pos_off>=exit_off, 1=0)`,
	"I12: failed has a reason": `SELECT run_id FROM runs WHERE status='failed' AND error IS NULL`,
	"I20: nothing is destroyed under a run": `SELECT r.run_id FROM runs r JOIN sandbox_instances s ON s.key=r.sandbox_key AND s.gen=r.sandbox_gen
 WHERE r.status='running' AND r.cancel_at IS NULL AND s.desired='destroyed'`,
	"I21: every run has a secret": `SELECT r.run_id FROM runs r LEFT JOIN run_secrets s ON s.run_id=r.run_id WHERE s.nonce IS NULL`,
	"no events without a run":     `SELECT e.run_id FROM run_events e LEFT JOIN runs r ON r.run_id=e.run_id WHERE r.run_id IS NULL`,
	"one living generation":       `SELECT key FROM sandbox_instances WHERE state NOT IN ('destroyed','lost') AND desired<>'destroyed' GROUP BY key HAVING count(*)>1`,
}
