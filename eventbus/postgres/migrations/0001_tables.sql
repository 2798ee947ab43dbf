-- Tables of the storage engine. What happens per event is only inserted; see docs/storage-engine.md.

-- One row: the state of the whole bus.
CREATE TABLE {schema}.bus (
    one boolean PRIMARY KEY DEFAULT true CHECK (one),
    state text NOT NULL DEFAULT 'running' CHECK (state IN ('running', 'paused')),
    reason text,
    bindings_version bigint NOT NULL DEFAULT 1,
    changed_at timestamptz NOT NULL DEFAULT clock_timestamp()
);
INSERT INTO {schema}.bus DEFAULT VALUES;

-- Every event, once. xid stands before id on purpose: defaults are evaluated in column order, so a transaction
-- has its xid before it draws its first id, and the relay's position can bound ids by xids.
CREATE TABLE {schema}.outbox (
    xid xid8 NOT NULL DEFAULT pg_catalog.pg_current_xact_id(),
    id bigint GENERATED ALWAYS AS IDENTITY (CACHE 1) PRIMARY KEY,
    published_at timestamptz NOT NULL DEFAULT pg_catalog.clock_timestamp(),
    event_id uuid NOT NULL,
    size integer NOT NULL,
    priority smallint NOT NULL DEFAULT 0,
    topic text COLLATE "C" NOT NULL CHECK (pg_catalog.octet_length(topic) BETWEEN 1 AND 255),
    key text COLLATE "C",
    payload json NOT NULL,
    headers json
);
CREATE INDEX outbox_xid_id ON {schema}.outbox (xid, id);
CREATE INDEX outbox_event_id ON {schema}.outbox (event_id);

-- Delayed events, written in the publisher's own transaction, moved to the outbox when they are due.
CREATE TABLE {schema}.scheduled (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    due_at timestamptz NOT NULL,
    created_at timestamptz NOT NULL DEFAULT pg_catalog.clock_timestamp(),
    event_id uuid NOT NULL,
    size integer NOT NULL,
    priority smallint NOT NULL DEFAULT 0,
    topic text COLLATE "C" NOT NULL CHECK (pg_catalog.octet_length(topic) BETWEEN 1 AND 255),
    key text COLLATE "C",
    payload json NOT NULL,
    headers json
);
CREATE INDEX scheduled_due ON {schema}.scheduled (due_at, id);
CREATE INDEX scheduled_event_id ON {schema}.scheduled (event_id);

-- The newest row is the relay's position.
--   snapshot, next_xid, ids_upto: everything visible in the snapshot is relayed; a row with a higher xid than
--     next_xid has a higher id than ids_upto.
--   window_*: an unfinished difference towards window_snapshot; rows of it with id <= last_id are relayed.
CREATE TABLE {schema}.ticks (
    id bigint PRIMARY KEY,
    snapshot pg_snapshot NOT NULL,
    next_xid xid8 NOT NULL,
    ids_upto bigint NOT NULL,
    window_snapshot pg_snapshot,
    window_next_xid xid8,
    window_ids_upto bigint,
    last_id bigint,
    system_identifier bigint NOT NULL,
    database_oid oid NOT NULL,
    created_at timestamptz NOT NULL DEFAULT pg_catalog.clock_timestamp(),
    events integer NOT NULL DEFAULT 0,
    deliveries integer NOT NULL DEFAULT 0,
    fed integer[] NOT NULL DEFAULT '{}'
);

CREATE TABLE {schema}.queues (
    id integer GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    name text COLLATE "C" NOT NULL UNIQUE,
    state text NOT NULL DEFAULT 'active' CHECK (state IN ('active', 'filling')),
    tracking text NOT NULL DEFAULT 'none' CHECK (tracking IN ('none', 'idempotent', 'transactional')),
    when_exhausted text NOT NULL DEFAULT 'park' CHECK (when_exhausted IN ('park', 'skip')),
    created_at timestamptz NOT NULL DEFAULT pg_catalog.clock_timestamp()
);

-- Whose turn it is to look after the tables of plugins, and until when nobody else does; see take_duty.
CREATE TABLE {schema}.duties (
    name text COLLATE "C" PRIMARY KEY,
    taken_until timestamptz NOT NULL
);

-- Why nothing of a queue is claimed; see 0014_pauses.sql. source: who paused it, manual is the operator.
--   until, seconds: how long; probe_seconds: how long the probe may take that may end it. probe_*: the one that is out.
CREATE TABLE {schema}.pauses (
    queue_id integer NOT NULL REFERENCES {schema}.queues ON DELETE CASCADE,
    source text COLLATE "C" NOT NULL,
    since timestamptz NOT NULL DEFAULT pg_catalog.clock_timestamp(),
    until timestamptz,
    seconds double precision CHECK (seconds >= 0),
    probe_seconds double precision CHECK (probe_seconds > 0),
    probe_until timestamptz,
    probe_by uuid,
    probe_token uuid,
    reason text NOT NULL,
    PRIMARY KEY (queue_id, source),
    CHECK ((until IS NULL) = (seconds IS NULL)),
    CHECK (until IS NOT NULL OR probe_seconds IS NULL),
    CHECK (source <> 'manual' OR probe_seconds IS NULL),
    CHECK (probe_seconds IS NOT NULL OR probe_until IS NULL),
    CHECK ((probe_until IS NOT NULL) = (probe_by IS NOT NULL AND probe_token IS NOT NULL))
);

-- How a queue is split into lanes: lane_from .. lane_from + lanes - 1. A queue whose lanes change gets a new row. The
-- newest gets what is relayed; the oldest is claimed from until nothing of it is left, and then removed.
CREATE TABLE {schema}.layouts (
    queue_id integer NOT NULL REFERENCES {schema}.queues ON DELETE CASCADE,
    lane_from integer NOT NULL,
    lanes integer NOT NULL CHECK (lanes BETWEEN 1 AND 1024),
    kind text NOT NULL CHECK (kind IN ('plain', 'ordered', 'prioritized')),
    PRIMARY KEY (queue_id, lane_from)
);

-- How far a new queue that starts with the earliest event has come; the same position as that of a tick. restored: it
-- begins anew, because this is another cluster, and leaves out what it has.
CREATE TABLE {schema}.fillings (
    queue_id integer PRIMARY KEY REFERENCES {schema}.queues ON DELETE CASCADE,
    snapshot pg_snapshot NOT NULL,
    next_xid xid8 NOT NULL,
    ids_upto bigint NOT NULL,
    window_snapshot pg_snapshot,
    window_next_xid xid8,
    window_ids_upto bigint,
    last_id bigint NOT NULL DEFAULT 0,
    deliveries bigint NOT NULL DEFAULT 0,
    restored boolean NOT NULL DEFAULT false
);

-- Retained events played into a queue once more. last_id: the last outbox row that was looked at.
CREATE TABLE {schema}.replays (
    id integer GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    queue_id integer NOT NULL REFERENCES {schema}.queues ON DELETE CASCADE,
    since timestamptz,
    until timestamptz,
    topics text[] COLLATE "C" NOT NULL,
    last_id bigint NOT NULL,
    upto_id bigint NOT NULL,
    deliveries bigint NOT NULL DEFAULT 0,
    state text NOT NULL DEFAULT 'running' CHECK (state IN ('running', 'finished')),
    created_at timestamptz NOT NULL DEFAULT pg_catalog.clock_timestamp()
);

CREATE TABLE {schema}.bindings (
    queue_id integer NOT NULL REFERENCES {schema}.queues ON DELETE CASCADE,
    pattern text COLLATE "C" NOT NULL,
    PRIMARY KEY (queue_id, pattern)
);

-- A topic is resolved into routes once per version of the bindings.
CREATE TABLE {schema}.topics (
    id integer GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    topic text COLLATE "C" NOT NULL UNIQUE,
    bindings_version bigint NOT NULL,
    fanout integer NOT NULL,
    unrouted bigint NOT NULL DEFAULT 0,
    first_seen_at timestamptz NOT NULL DEFAULT pg_catalog.clock_timestamp()
);

CREATE TABLE {schema}.routes (
    topic_id integer NOT NULL REFERENCES {schema}.topics ON DELETE CASCADE,
    queue_id integer NOT NULL REFERENCES {schema}.queues ON DELETE CASCADE,
    PRIMARY KEY (topic_id, queue_id)
);
CREATE INDEX routes_queue ON {schema}.routes (queue_id);

CREATE TABLE {schema}.deliveries (
    seq bigint NOT NULL,
    outbox_id bigint NOT NULL,
    queue_id integer NOT NULL,
    lane integer NOT NULL,
    replay_id integer NOT NULL DEFAULT 0,
    size integer NOT NULL,
    PRIMARY KEY (queue_id, lane, seq)
);
-- Finds the deliveries of one event (eventbus explain). Ids almost ascend, so ranges of blocks suffice.
CREATE INDEX deliveries_outbox ON {schema}.deliveries USING brin (outbox_id)
    WITH (pages_per_range = 32, autosummarize = on);

CREATE TABLE {schema}.workers (
    id uuid PRIMARY KEY,
    state text NOT NULL DEFAULT 'live' CHECK (state IN ('live', 'dead')),
    host text NOT NULL,
    pid integer NOT NULL,
    started_at timestamptz NOT NULL DEFAULT pg_catalog.clock_timestamp(),
    heartbeat_at timestamptz NOT NULL DEFAULT pg_catalog.clock_timestamp(),
    open_from bigint NOT NULL DEFAULT 0,
    started json NOT NULL DEFAULT '{}'
) WITH (fillfactor = 50);
CREATE INDEX workers_live ON {schema}.workers (id) WHERE state = 'live';

-- A range of one lane, leased. The newest hi is the lane's position.
CREATE TABLE {schema}.claims (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    token uuid NOT NULL,
    worker_id uuid NOT NULL,
    lo bigint NOT NULL,
    hi bigint NOT NULL,
    queue_id integer NOT NULL,
    lane integer NOT NULL,
    claimed_at timestamptz NOT NULL DEFAULT pg_catalog.clock_timestamp(),
    UNIQUE (queue_id, lane, lo),
    CHECK (hi >= lo)
);
CREATE INDEX claims_worker ON {schema}.claims (worker_id, id);

-- What became of single deliveries of a claim before the claim as a whole was settled.
CREATE TABLE {schema}.progress (
    claim_id bigint NOT NULL,
    seq bigint NOT NULL,
    outcome text NOT NULL
        CHECK (outcome IN ('done', 'retry', 'dead', 'released', 'deferred', 'parked', 'held', 'lost')),
    PRIMARY KEY (claim_id, seq)
);

CREATE TABLE {schema}.settlements (
    claim_id bigint PRIMARY KEY REFERENCES {schema}.claims,
    kind text NOT NULL CHECK (kind IN ('settled', 'lost')),
    settled_at timestamptz NOT NULL DEFAULT pg_catalog.clock_timestamp()
);

-- Deliveries that left the happy path. A row with range_hi stands for seq..range_hi, none of which ever started. One
-- that may have killed workers runs alone in its process.
--   key: what it is ordered by, null in a queue that is not ordered. Of the rows of one key at most one is not parked.
--   finished: its transactional handler has committed; what is left is to remove the row.
--   redriven_from: the number of the dead letter that it was.
CREATE TABLE {schema}.exceptions (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    due_at timestamptz NOT NULL,
    seq bigint NOT NULL,
    range_hi bigint,
    outbox_id bigint,
    redriven_from bigint,
    queue_id integer NOT NULL,
    lane integer NOT NULL,
    replay_id integer NOT NULL DEFAULT 0,
    attempts integer NOT NULL DEFAULT 0,
    crashes integer NOT NULL DEFAULT 0,
    alone boolean NOT NULL DEFAULT false,
    finished boolean NOT NULL DEFAULT false,
    state text NOT NULL DEFAULT 'waiting' CHECK (state IN ('waiting', 'parked', 'claimed')),
    key text COLLATE "C",
    token uuid,
    worker_id uuid,
    created_at timestamptz NOT NULL DEFAULT pg_catalog.clock_timestamp(),
    first_error json,
    last_error json,
    CHECK ((state = 'claimed') = (token IS NOT NULL AND worker_id IS NOT NULL)),
    CHECK (state <> 'parked' OR key IS NOT NULL),
    CHECK ((range_hi IS NULL) = (outbox_id IS NOT NULL)),
    CHECK (range_hi >= seq)
) WITH (fillfactor = 75);
CREATE INDEX exceptions_due ON {schema}.exceptions (queue_id, lane, due_at, id) WHERE state = 'waiting' AND NOT alone;
CREATE INDEX exceptions_alone ON {schema}.exceptions (queue_id, due_at, id) WHERE state = 'waiting' AND alone;
CREATE INDEX exceptions_worker ON {schema}.exceptions (worker_id, id) WHERE state = 'claimed';
CREATE INDEX exceptions_key ON {schema}.exceptions (queue_id, lane, key, seq) WHERE key IS NOT NULL;

-- Deliveries that gave up, each with its whole event. blocks: later events of its key are parked behind it.
CREATE TABLE {schema}.dead_letters (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    died_at timestamptz NOT NULL DEFAULT pg_catalog.clock_timestamp(),
    published_at timestamptz,
    queue_id integer NOT NULL REFERENCES {schema}.queues ON DELETE CASCADE,
    lane integer NOT NULL,
    seq bigint NOT NULL,
    outbox_id bigint NOT NULL,
    redriven_from bigint,
    replay_id integer NOT NULL DEFAULT 0,
    attempts integer NOT NULL,
    crashes integer NOT NULL,
    blocks boolean NOT NULL DEFAULT false,
    event_id uuid,
    topic text COLLATE "C",
    key text COLLATE "C",
    payload json,
    headers json,
    reason text NOT NULL,
    first_error json,
    last_error json
);
CREATE INDEX dead_letters_queue ON {schema}.dead_letters (queue_id, id);
CREATE INDEX dead_letters_event ON {schema}.dead_letters (event_id);
CREATE INDEX dead_letters_blocking ON {schema}.dead_letters (queue_id, lane, key) WHERE blocks;

-- Executions of the queues that record them. Pending until completed_at is set. owner: the outbox row whose delivery
-- runs it or will run it again; null when nobody does. Completed rows are removed when they are old enough. Half of each
-- page stays free: a settlement completes all of its rows at once, and each new version stays beside the old one.
CREATE TABLE {schema}.processed_events (
    claimed_at timestamptz NOT NULL DEFAULT pg_catalog.clock_timestamp(),
    completed_at timestamptz,
    event_id uuid NOT NULL,
    owner bigint,
    queue_id integer NOT NULL,
    replay_id integer NOT NULL DEFAULT 0,
    PRIMARY KEY (queue_id, event_id, replay_id)
) WITH (fillfactor = 48);
CREATE INDEX processed_events_age ON {schema}.processed_events USING brin (claimed_at)
    WITH (pages_per_range = 32, autosummarize = on);
