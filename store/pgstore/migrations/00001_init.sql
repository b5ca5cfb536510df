-- Times are milliseconds of this database's clock, as in SQLite, so that both stores
-- share their statements. Texts are compared by bytes. No column that an append
-- changes has an index, so that these updates stay on their page.

-- +goose Up
CREATE TABLE runs (
  run_id TEXT COLLATE "C" PRIMARY KEY,
  thread_id TEXT COLLATE "C" NOT NULL,
  tenant TEXT COLLATE "C" NOT NULL,
  parent_run_id TEXT COLLATE "C" NOT NULL DEFAULT '',
  definition TEXT COLLATE "C" NOT NULL DEFAULT '',
  adapter TEXT COLLATE "C" NOT NULL DEFAULT '',
  kind TEXT COLLATE "C" NOT NULL CHECK (kind IN ('sandbox','chat')),
  input BYTEA,
  status TEXT COLLATE "C" NOT NULL CHECK (status IN ('running','interrupted','completed','failed','aborted')),
  started_at BIGINT NOT NULL,
  finished_at BIGINT,
  closed_at BIGINT,
  close_reason TEXT COLLATE "C" NOT NULL DEFAULT '',
  error TEXT COLLATE "C",
  usage TEXT COLLATE "C",
  epoch BIGINT NOT NULL DEFAULT 0,
  owner TEXT COLLATE "C" NOT NULL DEFAULT '',
  lease_until BIGINT,
  batch_no BIGINT NOT NULL DEFAULT 0,
  next_seq BIGINT NOT NULL DEFAULT 1,
  pos_off BIGINT NOT NULL DEFAULT 0,
  pos_idx INTEGER NOT NULL DEFAULT -1,
  exit_code BIGINT,
  exit_off BIGINT,
  sentinel_ok INTEGER NOT NULL DEFAULT 0,
  exit_ok INTEGER NOT NULL DEFAULT 0,
  launch TEXT COLLATE "C" NOT NULL DEFAULT 'none',
  sandbox_key TEXT COLLATE "C" NOT NULL DEFAULT '',
  sandbox_gen BIGINT NOT NULL DEFAULT 0,
  last_viewed_at BIGINT NOT NULL,
  cancel_at BIGINT,
  cancel_reason TEXT COLLATE "C" NOT NULL DEFAULT '',
  next_reap_at BIGINT NOT NULL,
  reap_attempts INTEGER NOT NULL DEFAULT 0,
  events_expired INTEGER NOT NULL DEFAULT 0, -- 1: being deleted, 2: deleted
  journal_hold INTEGER NOT NULL DEFAULT 0,
  part INTEGER NOT NULL DEFAULT to_char(clock_timestamp() AT TIME ZONE 'UTC', 'YYYYMM')::integer, -- month: where its events are
  CHECK ((closed_at IS NULL) = (status = 'running')),
  CHECK ((finished_at IS NULL) = (status IN ('running','interrupted'))),
  CHECK (status <> 'failed' OR error IS NOT NULL),
  -- Every operand is tested for NULL: a CHECK that gives NULL passes.
  CHECK (status <> 'completed' OR kind = 'chat'
    OR (sentinel_ok = 1 AND exit_ok = 1 AND exit_code IS NOT NULL AND exit_off IS NOT NULL AND pos_off >= exit_off))
) WITH (fillfactor = 70);
CREATE INDEX runs_active ON runs (tenant, thread_id, started_at) WHERE status = 'running';
CREATE INDEX runs_due ON runs (next_reap_at) WHERE status = 'running';
CREATE INDEX runs_bound ON runs (sandbox_key, sandbox_gen) WHERE status = 'running';
CREATE INDEX runs_list ON runs (tenant, started_at, run_id);
CREATE INDEX runs_all ON runs (started_at, run_id);
CREATE INDEX runs_thread ON runs (tenant, thread_id, started_at, run_id);
CREATE INDEX runs_old ON runs (closed_at) WHERE closed_at IS NOT NULL AND events_expired = 0;
CREATE INDEX runs_part ON runs (part, events_expired);
CREATE INDEX runs_expiring ON runs (closed_at) WHERE events_expired = 1;

CREATE TABLE run_secrets (
  run_id TEXT COLLATE "C" PRIMARY KEY REFERENCES runs ON DELETE CASCADE,
  nonce BYTEA NOT NULL
);

-- Partitions are made by the program, a few months ahead.
CREATE TABLE run_events (
  part INTEGER NOT NULL,
  run_id TEXT COLLATE "C" NOT NULL,
  seq BIGINT NOT NULL,
  epoch BIGINT NOT NULL,
  origin INTEGER NOT NULL, -- 0: journal, 1: live
  src_off BIGINT,
  src_idx INTEGER,
  fp BYTEA,
  at BIGINT NOT NULL,
  chunk TEXT COLLATE "C" NOT NULL,
  PRIMARY KEY (run_id, seq, part),
  CHECK ((origin = 0) = (src_off IS NOT NULL AND src_idx IS NOT NULL))
) PARTITION BY LIST (part);
CREATE UNIQUE INDEX run_events_src ON run_events (run_id, src_off, src_idx, part) WHERE origin = 0;

CREATE TABLE sandbox_instances (
  key TEXT COLLATE "C" NOT NULL,
  gen BIGINT NOT NULL,
  provider TEXT COLLATE "C" NOT NULL,
  ref BYTEA,
  state TEXT COLLATE "C" NOT NULL CHECK (state IN ('creating','ready','destroying','destroyed','lost')),
  desired TEXT COLLATE "C" NOT NULL CHECK (desired IN ('ready','destroyed')),
  tenant TEXT COLLATE "C" NOT NULL,
  thread_id TEXT COLLATE "C" NOT NULL,
  latest_run_id TEXT COLLATE "C" NOT NULL,
  snapshot_id TEXT COLLATE "C" NOT NULL,
  created_at BIGINT NOT NULL,
  last_used_at BIGINT NOT NULL,
  snapshot_at BIGINT,
  keep_until BIGINT,
  last_error TEXT COLLATE "C" NOT NULL,
  attempts INTEGER NOT NULL DEFAULT 0,
  next_try_at BIGINT NOT NULL DEFAULT 0,
  PRIMARY KEY (key, gen)
);
CREATE INDEX instances_due ON sandbox_instances (next_try_at) WHERE state NOT IN ('destroyed','lost');
CREATE INDEX instances_tenant ON sandbox_instances (tenant, key, gen);

CREATE TABLE messages (
  tenant TEXT COLLATE "C" NOT NULL,
  thread_id TEXT COLLATE "C" NOT NULL,
  messages TEXT COLLATE "C" NOT NULL,
  n INTEGER NOT NULL,
  updated_at BIGINT NOT NULL,
  PRIMARY KEY (tenant, thread_id)
);
CREATE INDEX messages_list ON messages (thread_id, tenant);

CREATE TABLE interrupts (
  ord BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
  run_id TEXT COLLATE "C" NOT NULL,
  id TEXT COLLATE "C" NOT NULL,
  thread_id TEXT COLLATE "C" NOT NULL,
  tenant TEXT COLLATE "C" NOT NULL,
  payload BYTEA,
  status TEXT COLLATE "C" NOT NULL CHECK (status IN ('pending','resolved','cancelled')),
  answer BYTEA,
  created_at BIGINT NOT NULL,
  resolved_at BIGINT,
  UNIQUE (run_id, id),
  CHECK ((resolved_at IS NULL) = (status = 'pending'))
);
CREATE INDEX interrupts_pending ON interrupts (tenant, thread_id, ord) WHERE status = 'pending';

CREATE TABLE leases (
  key TEXT COLLATE "C" PRIMARY KEY,
  owner TEXT COLLATE "C" NOT NULL,
  epoch BIGINT NOT NULL,
  expires BIGINT NOT NULL
);
CREATE SEQUENCE lease_epoch;
