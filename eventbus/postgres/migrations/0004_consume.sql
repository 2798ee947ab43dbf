-- Consuming: workers, claims, settlements, exceptions, take-over.
-- SQLSTATE EB001: this worker is not live (taken over); register anew. EB002: the bus is paused.

CREATE FUNCTION {schema}.register_worker(p_id uuid, p_host text, p_pid integer) RETURNS void
LANGUAGE sql VOLATILE
BEGIN ATOMIC
    INSERT INTO {schema}.workers (id, host, pid) VALUES (p_id, p_host, p_pid);
END;

-- One heartbeat. p_started: {"claim id": highest started seq} of every open claim; p_open_from: as far as the worker
-- remembers, no open claim has a lower id. Its memory outlives a server crash that loses settlements and repeats ids,
-- so open_from follows it only past claims that are settled in this database, and not while a claim is in flight.
-- alive is false when the worker was taken over; expired counts the others whose last heartbeat is older than p_lease
-- seconds.
CREATE FUNCTION {schema}.beat(p_id uuid, p_lease double precision, p_open_from bigint, p_started json,
                              OUT alive boolean, OUT expired integer)
LANGUAGE plpgsql VOLATILE
SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off
SET plan_cache_mode = force_generic_plan AS $body$
DECLARE
    v_from bigint;
    v_open bigint;
BEGIN
    PERFORM {schema}.require_read_committed();
    PERFORM set_config('synchronous_commit', 'off', true);
    SELECT w.open_from INTO v_from FROM {schema}.workers w
    WHERE w.id = p_id AND w.state = 'live' AND w.open_from < p_open_from FOR UPDATE SKIP LOCKED;
    IF FOUND THEN
        SELECT least(
            (SELECT c.id FROM {schema}.claims c
             WHERE c.worker_id = p_id AND c.id >= v_from AND c.id < p_open_from
               AND NOT EXISTS (SELECT 1 FROM {schema}.settlements s WHERE s.claim_id = c.id)
             ORDER BY c.id LIMIT 1),
            coalesce((
                SELECT c.id + 1 FROM {schema}.claims c WHERE c.worker_id = p_id ORDER BY c.id DESC LIMIT 1), v_from),
            p_open_from)
        INTO v_open;
    END IF;
    UPDATE {schema}.workers w
    SET heartbeat_at = clock_timestamp(), started = p_started, open_from = greatest(w.open_from, v_open)
    WHERE w.id = p_id AND w.state = 'live';
    alive := FOUND;
    SELECT count(*) INTO expired FROM {schema}.workers w
    WHERE w.state = 'live' AND w.heartbeat_at < clock_timestamp() - make_interval(secs => p_lease);
END
$body$;

-- A worker leaves. Its peers are told, because nobody else knows when the retries that it was waiting for are due.
CREATE FUNCTION {schema}.unregister_worker(p_id uuid) RETURNS void
LANGUAGE plpgsql VOLATILE SET search_path = pg_catalog, pg_temp AS $body$
BEGIN
    DELETE FROM {schema}.workers w WHERE w.id = p_id AND w.state = 'live'
        AND NOT EXISTS (SELECT 1 FROM {schema}.exceptions e WHERE e.worker_id = p_id AND e.state = 'claimed')
        AND NOT EXISTS (
            SELECT 1 FROM {schema}.claims c WHERE c.worker_id = p_id AND c.id >= w.open_from
            AND NOT EXISTS (SELECT 1 FROM {schema}.settlements s WHERE s.claim_id = c.id));
    UPDATE {schema}.workers w SET heartbeat_at = '-infinity' WHERE w.id = p_id AND w.state = 'live';
    PERFORM pg_notify('{name}.work', '*') WHERE pg_notification_queue_usage() < 0.5;
END
$body$;

-- The share lock makes take-over wait for this transaction, and this transaction see a take-over.
CREATE FUNCTION {schema}.require_live_worker(p_worker uuid) RETURNS void
LANGUAGE plpgsql VOLATILE SET search_path = pg_catalog, pg_temp AS $body$
BEGIN
    PERFORM 1 FROM {schema}.workers w WHERE w.id = p_worker AND w.state = 'live' FOR KEY SHARE;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'eventbus: worker % lost its lease', p_worker USING ERRCODE = 'EB001';
    END IF;
    PERFORM 1 FROM {schema}.bus b WHERE b.state = 'running';
    IF NOT FOUND THEN
        RAISE EXCEPTION 'eventbus: the bus is paused' USING ERRCODE = 'EB002';
    END IF;
END
$body$;

-- Claims the next range of each queue that has one, in the order given: at most p_limits[i] events of p_queues[i], at
-- most p_bytes of payload in all (at least one event). One row per delivery, in order; event_id is null where the
-- outbox no longer has the event. A row without claim_id tells of queue_id that it has more: with seq, deliveries up to
-- seq are left; without seq, another worker is claiming from it at this moment.
CREATE FUNCTION {schema}.claim(p_worker uuid, p_token uuid, p_queues integer[], p_limits integer[], p_bytes bigint)
RETURNS TABLE (claim_id bigint, queue_id integer, lane integer, seq bigint, size integer, event_id text, topic text,
               key text, payload text, headers text, published_at timestamptz)
LANGUAGE plpgsql VOLATILE
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
SET jit = off SET plan_cache_mode = force_generic_plan AS $body$
DECLARE
    v_lane record;
    v_live boolean := false;
    v_left bigint := p_bytes;
    v_bytes bigint;
    v_claim bigint;
    v_first bigint;
    v_lo bigint;
    v_hi bigint;
BEGIN
    PERFORM {schema}.require_read_committed();
    PERFORM set_config('synchronous_commit', 'off', true);
    FOR v_lane IN
        SELECT f.queue_id, f.lane, f.most, f.newest, row_number() OVER (ORDER BY f.place, f.lane) AS n FROM (
            SELECT u.queue_id, 0 AS lane, u.most, u.place,
                   (SELECT d.seq FROM {schema}.deliveries d WHERE d.queue_id = u.queue_id AND d.lane = 0
                    ORDER BY d.seq DESC LIMIT 1) AS newest,
                   (SELECT c.hi FROM {schema}.claims c WHERE c.queue_id = u.queue_id AND c.lane = 0
                    ORDER BY c.lo DESC LIMIT 1) AS claimed
            FROM unnest(p_queues, p_limits) WITH ORDINALITY AS u (queue_id, most, place)
        ) f
        WHERE f.most > 0 AND f.newest > coalesce(f.claimed, 0)
        ORDER BY n
    LOOP
        queue_id := v_lane.queue_id;
        lane := v_lane.lane;
        seq := v_lane.newest;
        IF v_left <= 0 OR v_lane.n > 64 THEN
            RETURN NEXT;
            CONTINUE;
        END IF;
        IF NOT v_live THEN
            PERFORM {schema}.require_live_worker(p_worker);
            v_live := true;
        END IF;
        IF NOT pg_try_advisory_xact_lock({schema}.lock_key('lane', v_lane.queue_id, v_lane.lane)) THEN
            seq := NULL;
            RETURN NEXT;
            CONTINUE;
        END IF;
        SELECT coalesce((
            SELECT c.hi FROM {schema}.claims c
            WHERE c.queue_id = v_lane.queue_id AND c.lane = v_lane.lane ORDER BY c.lo DESC LIMIT 1), 0)
        INTO v_lo;
        SELECT min(d.seq), max(d.seq), sum(d.size) INTO v_first, v_hi, v_bytes FROM {schema}.deliveries d
        WHERE d.queue_id = v_lane.queue_id AND d.lane = v_lane.lane
          AND d.seq > v_lo AND d.seq <= v_lo + v_lane.most;
        IF v_bytes > v_left THEN
            SELECT max(r.seq), max(r.bytes) INTO v_hi, v_bytes FROM (
                SELECT d.seq, sum(d.size) OVER (ORDER BY d.seq ROWS UNBOUNDED PRECEDING) AS bytes
                FROM {schema}.deliveries d
                WHERE d.queue_id = v_lane.queue_id AND d.lane = v_lane.lane AND d.seq BETWEEN v_first AND v_hi
            ) r
            WHERE r.bytes <= v_left OR (r.seq = v_first AND v_claim IS NULL);
        END IF;
        IF v_hi IS NULL THEN
            RETURN NEXT;
            CONTINUE;
        END IF;
        v_lo := v_first;
        v_left := v_left - v_bytes;
        INSERT INTO {schema}.claims (token, worker_id, lo, hi, queue_id, lane)
        VALUES (p_token, p_worker, v_lo, v_hi, v_lane.queue_id, v_lane.lane)
        RETURNING id INTO v_claim;
        RETURN QUERY
            SELECT v_claim, v_lane.queue_id, v_lane.lane, d.seq, o.size, o.event_id::text, o.topic, o.key,
                   o.payload::text, o.headers::text, o.published_at
            FROM {schema}.deliveries d
            LEFT JOIN LATERAL (SELECT o.* FROM {schema}.outbox o WHERE o.id = d.outbox_id OFFSET 0) o ON true
            WHERE d.queue_id = v_lane.queue_id AND d.lane = v_lane.lane AND d.seq BETWEEN v_lo AND v_hi
            ORDER BY d.seq;
        IF v_hi < v_lane.newest THEN
            RETURN NEXT;
        END IF;
    END LOOP;
END
$body$;

-- Claims exceptions that are due: at most p_limits[i] of p_queues[i], at most p_bytes of payload in all (at least
-- one). p_from[i] is where to start looking; the low end of the index is where the dead rows are. p_alone: only one,
-- and only one that must run alone.
-- A row without exception_id tells of queue_id: due_in, seconds until its next exception is due (negative: more are
-- due now; null: none waits), and crashed_in, the same for those that must run alone.
CREATE FUNCTION {schema}.claim_due(p_worker uuid, p_token uuid, p_queues integer[], p_limits integer[],
                                   p_from timestamptz[], p_bytes bigint, p_alone boolean)
RETURNS TABLE (exception_id bigint, queue_id integer, due_in double precision, crashed_in double precision,
               attempts integer, crashes integer, due_at timestamptz, size integer, event_id text, topic text,
               key text, payload text, headers text, published_at timestamptz)
LANGUAGE plpgsql VOLATILE
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
SET jit = off SET plan_cache_mode = force_generic_plan AS $body$
DECLARE
    v_queue record;
    v_live boolean := false;
    v_left bigint := p_bytes;
    v_found boolean;
    v_taken boolean := false;
    v_locked bigint[];
    v_ids bigint[];
    v_bytes bigint;
BEGIN
    PERFORM {schema}.require_read_committed();
    PERFORM set_config('synchronous_commit', 'off', true);
    FOR v_queue IN
        SELECT u.id, u.most, u.start FROM unnest(p_queues, p_limits, p_from) AS u (id, most, start) ORDER BY u.id
    LOOP
        IF p_alone THEN
            v_found := EXISTS (
                SELECT 1 FROM {schema}.exceptions e WHERE e.queue_id = v_queue.id AND e.state = 'waiting'
                AND e.alone AND e.due_at <= clock_timestamp());
        ELSE
            v_found := EXISTS (
                SELECT 1 FROM {schema}.exceptions e WHERE e.queue_id = v_queue.id AND e.state = 'waiting'
                AND NOT e.alone AND e.due_at >= v_queue.start AND e.due_at <= clock_timestamp());
        END IF;
        IF v_found AND v_queue.most > 0 AND v_left > 0 THEN
            IF NOT v_live THEN
                PERFORM {schema}.require_live_worker(p_worker);
                v_live := true;
            END IF;
            IF p_alone THEN
                v_locked := {schema}.lock_alone(v_queue.id);
            ELSE
                v_locked := {schema}.lock_due(p_worker, p_token, v_queue.id, v_queue.most, v_queue.start);
            END IF;
            SELECT coalesce(array_agg(r.id ORDER BY r.n), '{}'), max(r.bytes) INTO v_ids, v_bytes FROM (
                SELECT u.id, u.n, sum(coalesce((
                    SELECT (SELECT o.size FROM {schema}.outbox o WHERE o.id = e.outbox_id)
                    FROM {schema}.exceptions e WHERE e.id = u.id), 0)) OVER (ORDER BY u.n) AS bytes
                FROM unnest(v_locked) WITH ORDINALITY AS u (id, n)
            ) r WHERE r.bytes <= v_left OR (r.n = 1 AND NOT v_taken);
            v_left := v_left - coalesce(v_bytes, 0);
            v_taken := v_taken OR cardinality(v_ids) > 0;
            UPDATE {schema}.exceptions e SET state = 'claimed', token = p_token, worker_id = p_worker
            WHERE e.id = ANY (v_ids) AND e.token IS NULL;
            IF cardinality(v_ids) < cardinality(v_locked) THEN
                UPDATE {schema}.exceptions e SET state = 'waiting', token = NULL, worker_id = NULL
                WHERE e.id = ANY (v_locked) AND e.id <> ALL (v_ids) AND e.token IS NOT NULL;
            END IF;
            RETURN QUERY
                SELECT e.id, e.queue_id, NULL::double precision, NULL::double precision, e.attempts, e.crashes,
                       e.due_at, o.size, o.event_id::text, o.topic, o.key, o.payload::text, o.headers::text,
                       o.published_at
                FROM unnest(v_ids) WITH ORDINALITY AS u (id, n)
                CROSS JOIN LATERAL (SELECT e.* FROM {schema}.exceptions e WHERE e.id = u.id OFFSET 0) e
                LEFT JOIN LATERAL (SELECT o.* FROM {schema}.outbox o WHERE o.id = e.outbox_id OFFSET 0) o ON true
                ORDER BY u.n;
            EXIT WHEN p_alone AND cardinality(v_ids) > 0;
        END IF;
        RETURN QUERY
            SELECT NULL::bigint, v_queue.id,
                   (SELECT EXTRACT(EPOCH FROM e.due_at - clock_timestamp())::double precision
                    FROM {schema}.exceptions e
                    WHERE e.queue_id = v_queue.id AND e.state = 'waiting' AND NOT e.alone
                      AND e.due_at >= v_queue.start
                    ORDER BY e.due_at, e.id LIMIT 1),
                   (SELECT EXTRACT(EPOCH FROM e.due_at - clock_timestamp())::double precision
                    FROM {schema}.exceptions e
                    WHERE e.queue_id = v_queue.id AND e.state = 'waiting' AND e.alone
                    ORDER BY e.due_at, e.id LIMIT 1),
                   NULL::integer, NULL::integer, NULL::timestamptz, NULL::integer, NULL::text, NULL::text, NULL::text,
                   NULL::text, NULL::text, NULL::timestamptz;
    END LOOP;
END
$body$;

-- Locks one exception that must run alone.
CREATE FUNCTION {schema}.lock_alone(p_queue integer) RETURNS bigint[]
LANGUAGE plpgsql VOLATILE
SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off
SET plan_cache_mode = force_generic_plan AS $body$
BEGIN
    RETURN ARRAY(
        SELECT e.id FROM {schema}.exceptions e
        WHERE e.queue_id = p_queue AND e.state = 'waiting' AND e.alone AND e.due_at <= clock_timestamp()
        ORDER BY e.due_at, e.id LIMIT 1 FOR UPDATE SKIP LOCKED);
END
$body$;

-- Locks due exceptions of a queue. A released range is taken apart: the part that is taken becomes rows of its own,
-- held by this worker.
CREATE FUNCTION {schema}.lock_due(p_worker uuid, p_token uuid, p_queue integer, p_limit integer, p_from timestamptz)
RETURNS bigint[]
LANGUAGE plpgsql VOLATILE
SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off
SET plan_cache_mode = force_generic_plan AS $body$
DECLARE
    v_row record;
    v_ids bigint[] := '{}';
    v_part bigint[];
    v_hi bigint;
BEGIN
    FOR v_row IN
        SELECT e.id, e.lane, e.seq, e.range_hi, e.due_at FROM {schema}.exceptions e
        WHERE e.queue_id = p_queue AND e.state = 'waiting' AND NOT e.alone
          AND e.due_at >= p_from AND e.due_at <= clock_timestamp()
        ORDER BY e.due_at, e.id LIMIT p_limit FOR UPDATE SKIP LOCKED
    LOOP
        EXIT WHEN cardinality(v_ids) >= p_limit;
        IF v_row.range_hi IS NULL THEN
            v_ids := v_ids || v_row.id;
            CONTINUE;
        END IF;
        v_hi := least(v_row.range_hi, v_row.seq + p_limit - cardinality(v_ids) - 1);
        WITH part AS (
            INSERT INTO {schema}.exceptions (due_at, seq, outbox_id, queue_id, lane, replay_id, key, state, token,
                                             worker_id)
            SELECT v_row.due_at, d.seq, d.outbox_id, d.queue_id, d.lane, d.replay_id,
                   (SELECT o.key FROM {schema}.outbox o WHERE o.id = d.outbox_id), 'claimed', p_token, p_worker
            FROM {schema}.deliveries d
            WHERE d.queue_id = p_queue AND d.lane = v_row.lane AND d.seq BETWEEN v_row.seq AND v_hi
            ORDER BY d.seq
            RETURNING id
        )
        SELECT array_agg(p.id ORDER BY p.id) INTO v_part FROM part p;
        v_ids := v_ids || v_part;
        IF v_hi = v_row.range_hi THEN
            DELETE FROM {schema}.exceptions e WHERE e.id = v_row.id;
        ELSE
            UPDATE {schema}.exceptions e SET seq = v_hi + 1 WHERE e.id = v_row.id;
        END IF;
    END LOOP;
    RETURN v_ids;
END
$body$;

-- Records what became of single deliveries of one claim, which nobody else has recorded yet: the key of progress
-- decides between this worker and a take-over. Outcomes: [{"seq", "outcome", "delay", "reason", "error", "hi"}],
-- outcome retry | dead | released; delay in seconds; hi: the outcome is that of seq..hi, released only. Returns how
-- many were recorded.
CREATE FUNCTION {schema}.record(p_claim bigint, p_done bigint[], p_outcomes json) RETURNS integer
LANGUAGE plpgsql VOLATILE
SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off
SET plan_cache_mode = force_generic_plan AS $body$
DECLARE
    c {schema}.claims%ROWTYPE;
    v_recorded integer;
    v_released boolean;
BEGIN
    SELECT * INTO STRICT c FROM {schema}.claims k WHERE k.id = p_claim;
    WITH outcomes AS MATERIALIZED (
        SELECT r.* FROM json_to_recordset(p_outcomes)
            AS r (seq bigint, outcome text, delay double precision, reason text, error json, hi bigint)
    ), recorded AS (
        INSERT INTO {schema}.progress (claim_id, seq, outcome)
        SELECT c.id, u.seq, u.outcome FROM (
            SELECT d.seq, 'done' AS outcome FROM unnest(p_done) AS d (seq)
            UNION ALL
            SELECT g.seq, r.outcome FROM outcomes r, generate_series(r.seq, coalesce(r.hi, r.seq)) AS g (seq)
        ) u
        WHERE u.seq BETWEEN c.lo AND c.hi ORDER BY u.seq
        ON CONFLICT DO NOTHING
        RETURNING seq, outcome
    ), left_path AS MATERIALIZED (
        SELECT r.*, d.outbox_id, d.replay_id FROM outcomes r
        JOIN recorded p ON p.seq = r.seq
        LEFT JOIN LATERAL (
            SELECT d.outbox_id, d.replay_id FROM {schema}.deliveries d
            WHERE d.queue_id = c.queue_id AND d.lane = c.lane AND d.seq = r.seq OFFSET 0) d ON true
    ), retried AS (
        INSERT INTO {schema}.exceptions (due_at, seq, outbox_id, queue_id, lane, replay_id, attempts, key,
                                         first_error, last_error)
        SELECT clock_timestamp() + make_interval(secs => coalesce(l.delay, 0)), l.seq, l.outbox_id, c.queue_id, c.lane,
               l.replay_id, 1, (SELECT o.key FROM {schema}.outbox o WHERE o.id = l.outbox_id), l.error, l.error
        FROM left_path l
        WHERE l.outcome = 'retry' ORDER BY l.seq
    ), released AS (
        INSERT INTO {schema}.exceptions (due_at, seq, range_hi, queue_id, lane)
        SELECT clock_timestamp(), min(i.seq), max(i.seq), c.queue_id, c.lane
        FROM (SELECT p.seq, p.seq - row_number() OVER (ORDER BY p.seq) AS island
              FROM recorded p WHERE p.outcome = 'released') i
        GROUP BY i.island ORDER BY 2
    ), buried AS (
        INSERT INTO {schema}.dead_letters (published_at, queue_id, lane, seq, outbox_id, replay_id, attempts, crashes,
                                           event_id, topic, key, payload, headers, reason, first_error, last_error)
        SELECT o.published_at, c.queue_id, c.lane, l.seq, l.outbox_id, l.replay_id, 1, 0,
               o.event_id, o.topic, o.key, o.payload, o.headers, l.reason, l.error, l.error
        FROM left_path l
        LEFT JOIN LATERAL (SELECT o.* FROM {schema}.outbox o WHERE o.id = l.outbox_id OFFSET 0) o ON true
        WHERE l.outcome = 'dead' ORDER BY l.seq
    )
    SELECT count(*), coalesce(bool_or(p.outcome = 'released'), false) INTO v_recorded, v_released FROM recorded p;
    IF v_released THEN
        PERFORM pg_notify('{name}.work', '*') WHERE pg_notification_queue_usage() < 0.5;
    END IF;
    RETURN v_recorded;
END
$body$;

-- Settles whole claims. p_outcomes: [{"claim", "outcomes": [...]}] for those with anything but done. Every claim is
-- matched by (id, token); returned are the claims that are settled now by these tokens. One that is missing from the
-- answer was taken over: nothing of it was written. Repeating a call whose reply was lost gives the same answer.
CREATE FUNCTION {schema}.settle(p_ids bigint[], p_tokens uuid[], p_outcomes json) RETURNS SETOF bigint
LANGUAGE plpgsql VOLATILE
SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off
SET enable_mergejoin = off SET jit = off SET plan_cache_mode = force_generic_plan AS $body$
DECLARE
    v_new bigint[];
    v_claim record;
BEGIN
    PERFORM {schema}.require_read_committed();
    PERFORM set_config('synchronous_commit', 'off', true);
    WITH settled AS (
        INSERT INTO {schema}.settlements (claim_id, kind)
        SELECT c.id, 'settled' FROM unnest(p_ids, p_tokens) AS u (id, token)
        CROSS JOIN LATERAL (
            SELECT c.id FROM {schema}.claims c WHERE c.id = u.id AND c.token = u.token OFFSET 0) c
        ORDER BY c.id
        ON CONFLICT DO NOTHING
        RETURNING claim_id
    )
    SELECT coalesce(array_agg(s.claim_id), '{}') INTO v_new FROM settled s;
    IF p_outcomes IS NOT NULL THEN
        FOR v_claim IN
            SELECT r.claim, r.outcomes FROM json_to_recordset(p_outcomes) AS r (claim bigint, outcomes json)
            WHERE r.claim = ANY (v_new) ORDER BY r.claim
        LOOP
            PERFORM {schema}.record(v_claim.claim, '{}', v_claim.outcomes);
        END LOOP;
    END IF;
    RETURN QUERY SELECT unnest(v_new);
    IF cardinality(v_new) < cardinality(p_ids) THEN
        RETURN QUERY
            SELECT u.id FROM unnest(p_ids, p_tokens) AS u (id, token)
            WHERE u.id <> ALL (v_new)
              AND (SELECT c.token FROM {schema}.claims c WHERE c.id = u.id) = u.token
              AND (SELECT s.kind FROM {schema}.settlements s WHERE s.claim_id = u.id) = 'settled';
    END IF;
END
$body$;

-- Records finished deliveries of a claim that stays open. False when the claim is no longer this token's: nothing
-- was written.
CREATE FUNCTION {schema}.record_progress(p_claim bigint, p_token uuid, p_done bigint[], p_outcomes json)
RETURNS boolean
LANGUAGE plpgsql VOLATILE SET search_path = pg_catalog, pg_temp AS $body$
BEGIN
    PERFORM {schema}.require_read_committed();
    PERFORM set_config('synchronous_commit', 'off', true);
    PERFORM 1 FROM {schema}.claims c WHERE c.id = p_claim AND c.token = p_token
        AND NOT EXISTS (SELECT 1 FROM {schema}.settlements s WHERE s.claim_id = c.id);
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    PERFORM {schema}.record(p_claim, p_done, p_outcomes);
    RETURN NOT EXISTS (SELECT 1 FROM {schema}.settlements s WHERE s.claim_id = p_claim);
END
$body$;

-- Settles exceptions held under p_token: [{"id", "outcome", "delay", "reason", "error"}], outcome done | retry | dead
-- | released. Returns those that were still held; the others were taken over and nothing of them was written.
CREATE FUNCTION {schema}.settle_exceptions(p_ids bigint[], p_tokens uuid[], p_outcomes json) RETURNS SETOF bigint
LANGUAGE plpgsql VOLATILE
SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off
SET plan_cache_mode = force_generic_plan AS $body$
DECLARE
    v_held bigint[];
BEGIN
    PERFORM {schema}.require_read_committed();
    PERFORM set_config('synchronous_commit', 'off', true);
    v_held := ARRAY(
        SELECT e.id FROM {schema}.exceptions e
        WHERE e.id = ANY (p_ids)
          AND (e.id, e.token) IN (SELECT u.id, u.token FROM unnest(p_ids, p_tokens) AS u (id, token))
        ORDER BY e.id FOR UPDATE);
    WITH outcomes AS MATERIALIZED (
        SELECT r.* FROM json_to_recordset(p_outcomes)
            AS r (id bigint, outcome text, delay double precision, reason text, error json)
        WHERE r.id = ANY (v_held)
    ), buried AS (
        INSERT INTO {schema}.dead_letters (published_at, queue_id, lane, seq, outbox_id, replay_id, attempts, crashes,
                                           event_id, topic, key, payload, headers, reason, first_error, last_error)
        SELECT o.published_at, e.queue_id, e.lane, e.seq, e.outbox_id, e.replay_id, e.attempts + 1, e.crashes,
               o.event_id, o.topic, o.key, o.payload, o.headers, r.reason, coalesce(e.first_error, r.error), r.error
        FROM outcomes r JOIN {schema}.exceptions e ON e.id = r.id AND e.id = ANY (v_held)
        LEFT JOIN LATERAL (SELECT o.* FROM {schema}.outbox o WHERE o.id = e.outbox_id OFFSET 0) o ON true
        WHERE r.outcome = 'dead' ORDER BY e.id
    ), gone AS (
        DELETE FROM {schema}.exceptions e
        WHERE e.id = ANY (ARRAY(SELECT r.id FROM outcomes r WHERE r.outcome IN ('done', 'dead')))
    )
    UPDATE {schema}.exceptions e SET
        state = 'waiting', token = NULL, worker_id = NULL,
        due_at = clock_timestamp() + make_interval(secs => coalesce(r.delay, 0)),
        attempts = e.attempts + CASE WHEN r.outcome = 'retry' THEN 1 ELSE 0 END,
        first_error = coalesce(e.first_error, r.error),
        last_error = coalesce(r.error, e.last_error)
    FROM outcomes r WHERE e.id = r.id AND e.id = ANY (v_held) AND r.outcome IN ('retry', 'released');
    PERFORM pg_notify('{name}.work', '*')
    FROM json_to_recordset(p_outcomes) AS r (outcome text)
    WHERE r.outcome = 'released' AND pg_notification_queue_usage() < 0.5 LIMIT 1;
    RETURN QUERY SELECT unnest(v_held);
END
$body$;

-- What this worker holds, by the database: open claims and exceptions. Claims are looked for from the open_from of its
-- last heartbeat on, which has been checked; p_open_from counts only for a worker that is not registered any more.
CREATE FUNCTION {schema}.held(p_worker uuid, p_open_from bigint) RETURNS TABLE (kind text, id bigint)
LANGUAGE sql STABLE SET enable_seqscan = off SET enable_bitmapscan = off
BEGIN ATOMIC
    SELECT 'claim', c.id FROM {schema}.claims c
    WHERE c.worker_id = p_worker
      AND c.id >= coalesce((SELECT w.open_from FROM {schema}.workers w WHERE w.id = p_worker), p_open_from)
      AND NOT EXISTS (SELECT 1 FROM {schema}.settlements s WHERE s.claim_id = c.id)
    UNION ALL
    SELECT 'exception', e.id FROM {schema}.exceptions e WHERE e.worker_id = p_worker AND e.state = 'claimed';
END;

-- Whether a delivery with so many crashes must have a process for itself: from the second one on, so that a single kill
-- of a worker costs no speed, and in time for the innocent ones, which run well alone and so never reach the last.
CREATE FUNCTION {schema}.must_run_alone(p_crashes integer, p_max_crashes integer) RETURNS boolean
LANGUAGE sql IMMUTABLE
RETURN p_crashes > 0 AND p_crashes >= least(2, p_max_crashes - 1);

-- Ends a claim on behalf of a worker that no longer works on it. Deliveries up to p_started come back as crashed,
-- or die at the p_max_crashes-th crash; the rest comes back as ranges that never started. p_started null: as if all
-- had started. Deliveries that the worker has recorded stay as recorded. Returns how many came back or died.
CREATE FUNCTION {schema}.give_back(p_claim bigint, p_started bigint, p_max_crashes integer) RETURNS integer
LANGUAGE plpgsql VOLATILE
SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off
SET plan_cache_mode = force_generic_plan AS $body$
DECLARE
    c {schema}.claims%ROWTYPE;
    v_lost bigint[];
BEGIN
    SELECT * INTO STRICT c FROM {schema}.claims k WHERE k.id = p_claim;
    INSERT INTO {schema}.settlements (claim_id, kind) VALUES (c.id, 'lost') ON CONFLICT DO NOTHING;
    IF NOT FOUND THEN
        RETURN 0;
    END IF;
    WITH lost AS (
        INSERT INTO {schema}.progress (claim_id, seq, outcome)
        SELECT c.id, g.seq, 'lost' FROM generate_series(c.lo, c.hi) AS g (seq) ORDER BY g.seq
        ON CONFLICT DO NOTHING
        RETURNING seq
    )
    SELECT coalesce(array_agg(l.seq ORDER BY l.seq), '{}') INTO v_lost FROM lost l;
    INSERT INTO {schema}.exceptions (due_at, seq, outbox_id, queue_id, lane, replay_id, crashes, alone, key)
    SELECT clock_timestamp(), d.seq, d.outbox_id, c.queue_id, c.lane, d.replay_id, 1,
           {schema}.must_run_alone(1, p_max_crashes),
           (SELECT o.key FROM {schema}.outbox o WHERE o.id = d.outbox_id)
    FROM unnest(v_lost) AS l (seq)
    CROSS JOIN LATERAL (
        SELECT d.seq, d.outbox_id, d.replay_id FROM {schema}.deliveries d
        WHERE d.queue_id = c.queue_id AND d.lane = c.lane AND d.seq = l.seq OFFSET 0) d
    WHERE l.seq <= coalesce(p_started, c.hi) AND p_max_crashes > 1
    ORDER BY d.seq;
    INSERT INTO {schema}.dead_letters (published_at, queue_id, lane, seq, outbox_id, replay_id, attempts, crashes,
                                       event_id, topic, key, payload, headers, reason)
    SELECT o.published_at, c.queue_id, c.lane, d.seq, d.outbox_id, d.replay_id, 0, 1,
           o.event_id, o.topic, o.key, o.payload, o.headers, 'worker died'
    FROM unnest(v_lost) AS l (seq)
    CROSS JOIN LATERAL (
        SELECT d.seq, d.outbox_id, d.replay_id FROM {schema}.deliveries d
        WHERE d.queue_id = c.queue_id AND d.lane = c.lane AND d.seq = l.seq OFFSET 0) d
    LEFT JOIN LATERAL (SELECT o.* FROM {schema}.outbox o WHERE o.id = d.outbox_id OFFSET 0) o ON true
    WHERE l.seq <= coalesce(p_started, c.hi) AND p_max_crashes <= 1
    ORDER BY d.seq;
    INSERT INTO {schema}.exceptions (due_at, seq, range_hi, queue_id, lane)
    SELECT clock_timestamp(), min(r.seq), max(r.seq), c.queue_id, c.lane
    FROM (SELECT l.seq, l.seq - row_number() OVER (ORDER BY l.seq) AS island
          FROM unnest(v_lost) AS l (seq) WHERE l.seq > coalesce(p_started, c.hi)) r
    GROUP BY r.island ORDER BY 3;
    RETURN cardinality(v_lost);
END
$body$;

-- Gives back exceptions on behalf of a worker that no longer works on them, each as crashed.
CREATE FUNCTION {schema}.give_back_exceptions(p_ids bigint[], p_crashes integer, p_max_crashes integer)
RETURNS integer
LANGUAGE plpgsql VOLATILE
SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off
SET plan_cache_mode = force_generic_plan AS $body$
BEGIN
    INSERT INTO {schema}.dead_letters (published_at, queue_id, lane, seq, outbox_id, replay_id, attempts, crashes,
                                       event_id, topic, key, payload, headers, reason, first_error, last_error)
    SELECT o.published_at, e.queue_id, e.lane, e.seq, e.outbox_id, e.replay_id, e.attempts, e.crashes + p_crashes,
           o.event_id, o.topic, o.key, o.payload, o.headers, 'worker died', e.first_error, e.last_error
    FROM {schema}.exceptions e
    LEFT JOIN LATERAL (SELECT o.* FROM {schema}.outbox o WHERE o.id = e.outbox_id OFFSET 0) o ON true
    WHERE e.id = ANY (p_ids) AND p_crashes > 0 AND e.crashes + p_crashes >= p_max_crashes
    ORDER BY e.id;
    DELETE FROM {schema}.exceptions e
    WHERE e.id = ANY (p_ids) AND p_crashes > 0 AND e.crashes + p_crashes >= p_max_crashes;
    UPDATE {schema}.exceptions e SET state = 'waiting', token = NULL, worker_id = NULL,
        due_at = clock_timestamp(), crashes = e.crashes + p_crashes,
        alone = {schema}.must_run_alone(e.crashes + p_crashes, p_max_crashes)
    WHERE e.id = ANY (p_ids);
    RETURN cardinality(p_ids);
END
$body$;

-- A worker releases what the database says it holds and it does not know: claims whose reply was lost. None of it
-- has started.
CREATE FUNCTION {schema}.release_unknown(p_worker uuid, p_claims bigint[], p_exceptions bigint[]) RETURNS integer
LANGUAGE plpgsql VOLATILE
SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off
SET plan_cache_mode = force_generic_plan AS $body$
DECLARE
    v_id bigint;
    v_held bigint[];
    v_count integer := 0;
BEGIN
    PERFORM {schema}.require_read_committed();
    FOR v_id IN
        SELECT c.id FROM {schema}.claims c WHERE c.id = ANY (p_claims) AND c.worker_id = p_worker ORDER BY c.id
    LOOP
        v_count := v_count + {schema}.give_back(v_id, 0, 2147483647);
    END LOOP;
    v_held := ARRAY(
        SELECT e.id FROM {schema}.exceptions e
        WHERE e.id = ANY (p_exceptions) AND e.worker_id = p_worker AND e.state = 'claimed'
        ORDER BY e.id FOR UPDATE);
    RETURN v_count + {schema}.give_back_exceptions(v_held, 0, 2147483647);
END
$body$;

-- Takes over the workers whose last heartbeat is older than p_lease seconds by this server's clock. Returns how
-- many workers and deliveries. Nothing happens within half a lease of the server's start: then everybody is silent.
CREATE FUNCTION {schema}.take_over(p_worker uuid, p_lease double precision, p_max_crashes integer,
                                   OUT workers integer, OUT deliveries integer)
LANGUAGE plpgsql VOLATILE
SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off
SET plan_cache_mode = force_generic_plan AS $body$
DECLARE
    v_dead record;
    v_claim record;
BEGIN
    workers := 0;
    deliveries := 0;
    PERFORM {schema}.require_read_committed();
    IF clock_timestamp() - pg_postmaster_start_time() < make_interval(secs => p_lease / 2) THEN
        RETURN;
    END IF;
    FOR v_dead IN
        UPDATE {schema}.workers w SET state = 'dead' WHERE w.id IN (
            SELECT x.id FROM {schema}.workers x
            WHERE x.state = 'live' AND x.id <> p_worker
              AND x.heartbeat_at < clock_timestamp() - make_interval(secs => p_lease)
            ORDER BY x.id LIMIT 16 FOR UPDATE SKIP LOCKED)
        RETURNING w.id, w.open_from, w.started
    LOOP
        workers := workers + 1;
        FOR v_claim IN
            SELECT h.id FROM {schema}.held(v_dead.id, v_dead.open_from) h WHERE h.kind = 'claim' ORDER BY h.id
        LOOP
            deliveries := deliveries + {schema}.give_back(
                v_claim.id, (v_dead.started ->> v_claim.id::text)::bigint, p_max_crashes);
        END LOOP;
        deliveries := deliveries + {schema}.give_back_exceptions(ARRAY(
            SELECT e.id FROM {schema}.exceptions e WHERE e.worker_id = v_dead.id AND e.state = 'claimed'
            ORDER BY e.id FOR UPDATE), 1, p_max_crashes);
    END LOOP;
    IF workers > 0 THEN
        PERFORM pg_notify('{name}.work', '*') WHERE pg_notification_queue_usage() < 0.5;
    END IF;
END
$body$;
