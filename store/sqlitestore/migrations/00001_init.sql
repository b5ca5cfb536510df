-- Times are milliseconds of this database's clock. Two processes may run this at
-- once: every statement does nothing where it was done.

-- +goose Up
CREATE TABLE IF NOT EXISTS runs (
  run_id TEXT PRIMARY KEY,
  thread_id TEXT NOT NULL,
  tenant TEXT NOT NULL,
  parent_run_id TEXT NOT NULL DEFAULT '',
  definition TEXT NOT NULL DEFAULT '',
  adapter TEXT NOT NULL DEFAULT '',
  kind TEXT NOT NULL CHECK (kind IN ('sandbox','chat')),
  input BLOB,
  status TEXT NOT NULL CHECK (status IN ('running','interrupted','completed','failed','aborted')),
  started_at INTEGER NOT NULL,
  finished_at INTEGER,
  closed_at INTEGER,
  close_reason TEXT NOT NULL DEFAULT '',
  error TEXT,
  usage TEXT,
  epoch INTEGER NOT NULL DEFAULT 0,
  owner TEXT NOT NULL DEFAULT '',
  lease_until INTEGER,
  batch_no INTEGER NOT NULL DEFAULT 0,
  next_seq INTEGER NOT NULL DEFAULT 1,
  pos_off INTEGER NOT NULL DEFAULT 0,
  pos_idx INTEGER NOT NULL DEFAULT -1,
  exit_code INTEGER,
  exit_off INTEGER,
  sentinel_ok INTEGER NOT NULL DEFAULT 0,
  exit_ok INTEGER NOT NULL DEFAULT 0,
  launch TEXT NOT NULL DEFAULT 'none',
  sandbox_key TEXT NOT NULL DEFAULT '',
  sandbox_gen INTEGER NOT NULL DEFAULT 0,
  last_viewed_at INTEGER NOT NULL,
  cancel_at INTEGER,
  cancel_reason TEXT NOT NULL DEFAULT '',
  next_reap_at INTEGER NOT NULL,
  reap_attempts INTEGER NOT NULL DEFAULT 0,
  events_expired INTEGER NOT NULL DEFAULT 0, -- 1: being deleted, 2: deleted
  journal_hold INTEGER NOT NULL DEFAULT 0,
  CHECK ((closed_at IS NULL) = (status = 'running')),
  CHECK ((finished_at IS NULL) = (status IN ('running','interrupted'))),
  CHECK (status <> 'failed' OR error IS NOT NULL),
  -- Every operand is tested for NULL: a CHECK that gives NULL passes.
  CHECK (status <> 'completed' OR kind = 'chat'
    OR (sentinel_ok = 1 AND exit_ok = 1 AND exit_code IS NOT NULL AND exit_off IS NOT NULL AND pos_off >= exit_off))
) STRICT;
CREATE INDEX IF NOT EXISTS runs_active ON runs (tenant, thread_id, started_at) WHERE status = 'running';
CREATE INDEX IF NOT EXISTS runs_due ON runs (next_reap_at) WHERE status = 'running';
CREATE INDEX IF NOT EXISTS runs_bound ON runs (sandbox_key, sandbox_gen) WHERE status = 'running';
CREATE INDEX IF NOT EXISTS runs_list ON runs (tenant, started_at, run_id);
CREATE INDEX IF NOT EXISTS runs_all ON runs (started_at, run_id);
CREATE INDEX IF NOT EXISTS runs_thread ON runs (tenant, thread_id, started_at, run_id);
CREATE INDEX IF NOT EXISTS runs_old ON runs (closed_at) WHERE closed_at IS NOT NULL AND events_expired = 0;
CREATE INDEX IF NOT EXISTS runs_expiring ON runs (closed_at) WHERE events_expired = 1;

CREATE TABLE IF NOT EXISTS run_secrets (
  run_id TEXT PRIMARY KEY REFERENCES runs ON DELETE CASCADE,
  nonce BLOB NOT NULL
) STRICT;

CREATE TABLE IF NOT EXISTS run_events (
  run_id TEXT NOT NULL,
  seq INTEGER NOT NULL,
  epoch INTEGER NOT NULL,
  origin INTEGER NOT NULL, -- 0: journal, 1: live
  src_off INTEGER,
  src_idx INTEGER,
  fp BLOB,
  at INTEGER NOT NULL,
  chunk TEXT NOT NULL,
  PRIMARY KEY (run_id, seq),
  CHECK ((origin = 0) = (src_off IS NOT NULL AND src_idx IS NOT NULL))
) STRICT, WITHOUT ROWID;
CREATE UNIQUE INDEX IF NOT EXISTS run_events_src ON run_events (run_id, src_off, src_idx) WHERE origin = 0;

CREATE TABLE IF NOT EXISTS sandbox_instances (
  key TEXT NOT NULL,
  gen INTEGER NOT NULL,
  provider TEXT NOT NULL,
  ref BLOB,
  state TEXT NOT NULL CHECK (state IN ('creating','ready','destroying','destroyed','lost')),
  desired TEXT NOT NULL CHECK (desired IN ('ready','destroyed')),
  tenant TEXT NOT NULL,
  thread_id TEXT NOT NULL,
  latest_run_id TEXT NOT NULL,
  snapshot_id TEXT NOT NULL,
  created_at INTEGER NOT NULL,
  last_used_at INTEGER NOT NULL,
  snapshot_at INTEGER,
  keep_until INTEGER,
  last_error TEXT NOT NULL,
  attempts INTEGER NOT NULL DEFAULT 0,
  next_try_at INTEGER NOT NULL DEFAULT 0,
  PRIMARY KEY (key, gen)
) STRICT;
CREATE INDEX IF NOT EXISTS instances_due ON sandbox_instances (next_try_at) WHERE state NOT IN ('destroyed','lost');
CREATE INDEX IF NOT EXISTS instances_tenant ON sandbox_instances (tenant, key, gen);

CREATE TABLE IF NOT EXISTS messages (
  tenant TEXT NOT NULL,
  thread_id TEXT NOT NULL,
  messages TEXT NOT NULL,
  n INTEGER NOT NULL,
  updated_at INTEGER NOT NULL,
  PRIMARY KEY (tenant, thread_id)
) STRICT;
CREATE INDEX IF NOT EXISTS messages_list ON messages (thread_id, tenant);

CREATE TABLE IF NOT EXISTS interrupts (
  ord INTEGER PRIMARY KEY AUTOINCREMENT,
  run_id TEXT NOT NULL,
  id TEXT NOT NULL,
  thread_id TEXT NOT NULL,
  tenant TEXT NOT NULL,
  payload BLOB,
  status TEXT NOT NULL CHECK (status IN ('pending','resolved','cancelled')),
  answer BLOB,
  created_at INTEGER NOT NULL,
  resolved_at INTEGER,
  UNIQUE (run_id, id),
  CHECK ((resolved_at IS NULL) = (status = 'pending'))
) STRICT;
CREATE INDEX IF NOT EXISTS interrupts_pending ON interrupts (tenant, thread_id, ord) WHERE status = 'pending';

CREATE TABLE IF NOT EXISTS leases (
  key TEXT PRIMARY KEY,
  owner TEXT NOT NULL,
  epoch INTEGER NOT NULL,
  expires INTEGER NOT NULL
) STRICT;
CREATE TABLE IF NOT EXISTS lease_epoch (
  one INTEGER PRIMARY KEY CHECK (one = 1),
  n INTEGER NOT NULL
) STRICT;
INSERT INTO lease_epoch (one, n) VALUES (1, 0) ON CONFLICT (one) DO NOTHING;
