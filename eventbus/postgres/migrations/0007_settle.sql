-- Settling: what became of claimed deliveries, written once, by the one who holds them.

-- Locks the ordered lanes of claims and exceptions, all in one order.
CREATE FUNCTION {schema}.lock_lanes_of(p_claims bigint[], p_exceptions bigint[]) RETURNS void
LANGUAGE plpgsql VOLATILE SET search_path = pg_catalog, pg_temp SET enable_seqscan = off AS $body$
BEGIN
    PERFORM {schema}.lock_lanes(array_agg(l.queue_id), array_agg(l.lane)) FROM (
        SELECT c.queue_id, c.lane FROM {schema}.claims c
        WHERE c.id = ANY (p_claims) AND {schema}.is_ordered(c.queue_id, c.lane)
        UNION
        SELECT e.queue_id, e.lane FROM {schema}.exceptions e WHERE e.id = ANY (p_exceptions) AND e.key IS NOT NULL
    ) l
    HAVING count(*) > 0;
END
$body$;

-- Records what became of single deliveries of one claim, which nobody else has recorded yet: the key of progress
-- decides between this worker and a take-over. Outcomes: [{"seq", "outcome", "delay", "reason", "error", "hi"}],
-- outcome retry | dead | released | deferred | parked; delay in seconds; hi: the outcome is that of seq..hi, released
-- only. Returns how many were recorded. The caller has locked the lane if it is ordered.
CREATE FUNCTION {schema}.record(p_claim bigint, p_done bigint[], p_outcomes json) RETURNS integer
LANGUAGE plpgsql VOLATILE
SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET enable_bitmapscan = off SET enable_memoize = off
SET jit = off SET plan_cache_mode = force_generic_plan AS $body$
DECLARE
    c {schema}.claims%ROWTYPE;
    v_ordered boolean;
    v_recorded integer;
    v_released boolean;
    v_dead bigint[];
    v_reasons text[];
    v_keys text[];
BEGIN
    SELECT * INTO STRICT c FROM {schema}.claims k WHERE k.id = p_claim;
    v_ordered := {schema}.is_ordered(c.queue_id, c.lane);
    WITH outcomes AS MATERIALIZED (
        SELECT g.seq, r.outcome, r.delay, r.reason, r.error
        FROM json_to_recordset(p_outcomes)
            AS r (seq bigint, outcome text, delay double precision, reason text, error json, hi bigint),
            generate_series(r.seq, coalesce(r.hi, r.seq)) AS g (seq)
    ), recorded AS (
        INSERT INTO {schema}.progress (claim_id, seq, outcome)
        SELECT c.id, u.seq, u.outcome FROM (
            SELECT d.seq, 'done' AS outcome FROM unnest(p_done) AS d (seq)
            UNION ALL
            SELECT r.seq, r.outcome FROM outcomes r
        ) u
        WHERE u.seq BETWEEN c.lo AND c.hi ORDER BY u.seq
        ON CONFLICT DO NOTHING
        RETURNING seq, outcome
    ), left_path AS MATERIALIZED (
        SELECT r.*, d.outbox_id, d.replay_id,
               CASE WHEN v_ordered THEN (SELECT o.key FROM {schema}.outbox o WHERE o.id = d.outbox_id) END AS key
        FROM outcomes r
        JOIN recorded p ON p.seq = r.seq
        CROSS JOIN LATERAL (
            SELECT d.outbox_id, d.replay_id FROM {schema}.deliveries d
            WHERE d.queue_id = c.queue_id AND d.lane = c.lane AND d.seq = r.seq OFFSET 0) d
        WHERE r.outcome <> 'released' OR v_ordered
    ), left_alone AS (
        INSERT INTO {schema}.exceptions (due_at, seq, outbox_id, queue_id, lane, replay_id, attempts, state, key,
                                         first_error, last_error)
        SELECT clock_timestamp() + make_interval(secs => coalesce(l.delay, 0)), l.seq, l.outbox_id, c.queue_id, c.lane,
               l.replay_id, CASE WHEN l.outcome IN ('retry', 'dead') THEN 1 ELSE 0 END,
               CASE WHEN l.key IS NOT NULL AND l.outcome IN ('released', 'parked') THEN 'parked' ELSE 'waiting' END,
               l.key, l.error, l.error
        FROM left_path l ORDER BY l.seq
        RETURNING id, seq, key
    ), left_together AS (
        INSERT INTO {schema}.exceptions (due_at, seq, range_hi, queue_id, lane)
        SELECT clock_timestamp(), min(i.seq), max(i.seq), c.queue_id, c.lane
        FROM (SELECT p.seq, p.seq - row_number() OVER (ORDER BY p.seq) AS island
              FROM recorded p WHERE p.outcome = 'released' AND NOT v_ordered) i
        GROUP BY i.island ORDER BY 2
    )
    SELECT (SELECT count(*) FROM recorded),
           EXISTS (SELECT 1 FROM recorded p WHERE p.outcome = 'released'),
           ARRAY(SELECT DISTINCT a.key FROM left_alone a WHERE a.key IS NOT NULL),
           ARRAY(SELECT a.id FROM left_alone a JOIN left_path l ON l.seq = a.seq
                 WHERE l.outcome = 'dead' ORDER BY l.seq),
           ARRAY(SELECT l.reason FROM left_path l WHERE l.outcome = 'dead' ORDER BY l.seq)
    INTO v_recorded, v_released, v_keys, v_dead, v_reasons;
    PERFORM {schema}.bury(v_dead, v_reasons);
    IF cardinality(v_keys) > 0 THEN
        PERFORM {schema}.advance_keys(c.queue_id, c.lane, v_keys);
    END IF;
    IF v_released THEN
        PERFORM pg_notify('{name}.work', '*') WHERE pg_notification_queue_usage() < 0.5;
    END IF;
    RETURN v_recorded;
END
$body$;

-- Settles whole claims. p_outcomes: [{"claim", "outcomes": [...]}] for those with anything but done. Every claim is
-- matched by (id, token); returned are the claims that are settled now by these tokens. One that is missing from the
-- answer was taken over: nothing of it was written. Repeating a call whose reply was lost gives the same answer.
-- Executions that are recorded are completed here, those of the claims in p_completing, or of all: the handlers of a
-- worker may have completed them already.
CREATE FUNCTION {schema}.settle(p_ids bigint[], p_tokens uuid[], p_outcomes json, p_completing bigint[] DEFAULT NULL)
RETURNS SETOF bigint
LANGUAGE plpgsql VOLATILE
SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off
SET enable_mergejoin = off SET enable_memoize = off SET jit = off SET plan_cache_mode = force_generic_plan AS $body$
DECLARE
    v_new bigint[];
    v_claim record;
BEGIN
    PERFORM {schema}.require_read_committed();
    PERFORM set_config('synchronous_commit', 'off', true);
    IF p_outcomes IS NOT NULL THEN
        PERFORM {schema}.lock_lanes_of(ARRAY(
            SELECT r.claim FROM json_to_recordset(p_outcomes) AS r (claim bigint)), '{}');
    END IF;
    WITH settled AS (
        INSERT INTO {schema}.settlements (claim_id, kind)
        SELECT c.id, 'settled' FROM unnest(p_ids, p_tokens) AS u (id, token)
        CROSS JOIN LATERAL (
            SELECT c.id FROM {schema}.claims c WHERE c.id = u.id AND c.token = u.token OFFSET 0) c
        ORDER BY c.id
        ON CONFLICT DO NOTHING
        RETURNING claim_id
    )
    SELECT coalesce(array_agg(s.claim_id ORDER BY s.claim_id), '{}') INTO v_new FROM settled s;
    IF p_outcomes IS NOT NULL THEN
        FOR v_claim IN
            SELECT r.claim, r.outcomes FROM json_to_recordset(p_outcomes) AS r (claim bigint, outcomes json)
            WHERE r.claim = ANY (v_new) ORDER BY r.claim
        LOOP
            PERFORM {schema}.record(v_claim.claim, '{}', v_claim.outcomes);
        END LOOP;
    END IF;
    PERFORM {schema}.complete_claim(u.id, NULL) FROM unnest(v_new) AS u (id)
    WHERE p_completing IS NULL OR u.id = ANY (p_completing);
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
    PERFORM {schema}.lock_lanes_of(ARRAY[p_claim], '{}');
    PERFORM 1 FROM {schema}.claims c WHERE c.id = p_claim AND c.token = p_token
        AND NOT EXISTS (SELECT 1 FROM {schema}.settlements s WHERE s.claim_id = c.id);
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    PERFORM {schema}.record(p_claim, p_done, p_outcomes);
    PERFORM {schema}.complete_claim(p_claim, p_done);
    RETURN NOT EXISTS (SELECT 1 FROM {schema}.settlements s WHERE s.claim_id = p_claim);
END
$body$;

-- Settles a claim of an ordered lane before all of its deliveries are finished, so that the lane goes on: those of
-- p_held, which are running, become exceptions that this worker holds under the same token, one row each; what neither
-- has an outcome nor is held comes back as never started. exception_id is null for one that has committed meanwhile.
-- The first row is empty; without it the claim was taken over, and nothing was written. A repeated call gives the same
-- answer.
CREATE FUNCTION {schema}.detach(p_claim bigint, p_token uuid, p_done bigint[], p_outcomes json, p_held bigint[])
RETURNS TABLE (seq bigint, exception_id bigint)
LANGUAGE plpgsql VOLATILE
SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET enable_bitmapscan = off SET enable_memoize = off
SET jit = off SET plan_cache_mode = force_generic_plan AS $body$
DECLARE
    c {schema}.claims%ROWTYPE;
    v_keys text[];
BEGIN
    PERFORM {schema}.require_read_committed();
    PERFORM set_config('synchronous_commit', 'off', true);
    SELECT * INTO c FROM {schema}.claims k WHERE k.id = p_claim AND k.token = p_token;
    IF c.id IS NULL THEN
        RETURN;
    END IF;
    PERFORM 1 FROM {schema}.workers w WHERE w.id = c.worker_id AND w.state = 'live' FOR KEY SHARE;
    IF NOT FOUND THEN
        RETURN;
    END IF;
    PERFORM {schema}.lock_lanes(ARRAY[c.queue_id], ARRAY[c.lane]);
    INSERT INTO {schema}.settlements (claim_id, kind) VALUES (c.id, 'settled') ON CONFLICT DO NOTHING;
    IF FOUND THEN
        PERFORM {schema}.record(p_claim, p_done, p_outcomes);
        PERFORM {schema}.complete_claim(p_claim, p_done);
        WITH kept AS (
            INSERT INTO {schema}.progress (claim_id, seq, outcome)
            SELECT c.id, g.seq, CASE WHEN g.seq = ANY (p_held) THEN 'held' ELSE 'released' END
            FROM generate_series(c.lo, c.hi) AS g (seq)
            WHERE g.seq <> ALL (p_done) ORDER BY g.seq
            ON CONFLICT DO NOTHING
            RETURNING progress.seq, progress.outcome
        ), moved AS (
            INSERT INTO {schema}.exceptions (due_at, seq, outbox_id, queue_id, lane, replay_id, state, key, token,
                                             worker_id)
            SELECT clock_timestamp(), d.seq, d.outbox_id, d.queue_id, d.lane, d.replay_id,
                   CASE WHEN k.outcome = 'held' THEN 'claimed' WHEN o.key IS NULL THEN 'waiting' ELSE 'parked' END,
                   o.key, CASE WHEN k.outcome = 'held' THEN c.token END,
                   CASE WHEN k.outcome = 'held' THEN c.worker_id END
            FROM kept k
            CROSS JOIN LATERAL (
                SELECT d.* FROM {schema}.deliveries d
                WHERE d.queue_id = c.queue_id AND d.lane = c.lane AND d.seq = k.seq OFFSET 0) d
            LEFT JOIN LATERAL (SELECT o.key FROM {schema}.outbox o WHERE o.id = d.outbox_id OFFSET 0) o ON true
            ORDER BY d.seq
            RETURNING exceptions.key
        )
        SELECT array_agg(DISTINCT m.key) INTO v_keys FROM moved m WHERE m.key IS NOT NULL;
        PERFORM {schema}.advance_keys(c.queue_id, c.lane, v_keys) WHERE v_keys IS NOT NULL;
        PERFORM pg_notify('{name}.work', '*') WHERE pg_notification_queue_usage() < 0.5;
    ELSIF (SELECT s.kind FROM {schema}.settlements s WHERE s.claim_id = c.id) <> 'settled' THEN
        RETURN;
    END IF;
    RETURN NEXT;
    RETURN QUERY
        SELECT h.seq, (SELECT e.id FROM {schema}.exceptions e
                       WHERE e.worker_id = c.worker_id AND e.state = 'claimed' AND e.token = c.token
                         AND e.queue_id = c.queue_id AND e.lane = c.lane AND e.seq = h.seq)
        FROM unnest(p_held) AS h (seq);
END
$body$;

-- Locks the ordered lanes of exceptions, also when they are moved to other lanes meanwhile.
CREATE FUNCTION {schema}.lock_lanes_of_exceptions(p_ids bigint[]) RETURNS void
LANGUAGE plpgsql VOLATILE SET search_path = pg_catalog, pg_temp SET enable_seqscan = off AS $body$
DECLARE
    v_queues integer[];
    v_lanes integer[];
    v_before integer[];
BEGIN
    LOOP
        SELECT array_agg(e.queue_id ORDER BY e.id), array_agg(e.lane ORDER BY e.id) INTO v_queues, v_lanes
        FROM {schema}.exceptions e WHERE e.id = ANY (p_ids) AND e.key IS NOT NULL;
        EXIT WHEN v_lanes IS NULL OR v_lanes = v_before;
        PERFORM {schema}.lock_lanes(v_queues, v_lanes);
        v_before := v_lanes;
    END LOOP;
END
$body$;

-- Settles exceptions held under p_token: [{"id", "outcome", "delay", "reason", "error"}], outcome done | retry | dead
-- | released | deferred | parked. Returns those that were still held; the others were taken over and nothing of them
-- was written. One whose transactional handler has committed is done, whatever the outcome says.
CREATE FUNCTION {schema}.settle_exceptions(p_ids bigint[], p_tokens uuid[], p_outcomes json) RETURNS SETOF bigint
LANGUAGE plpgsql VOLATILE
SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET enable_bitmapscan = off SET enable_memoize = off
SET jit = off SET plan_cache_mode = force_generic_plan AS $body$
DECLARE
    v_held bigint[];
    v_done bigint[];
    v_dead bigint[];
    v_reasons text[];
    v_lanes json;
BEGIN
    PERFORM {schema}.require_read_committed();
    PERFORM set_config('synchronous_commit', 'off', true);
    PERFORM {schema}.lock_lanes_of_exceptions(p_ids);
    v_held := ARRAY(
        SELECT e.id FROM {schema}.exceptions e
        WHERE e.id = ANY (p_ids)
          AND (e.id, e.token) IN (SELECT u.id, u.token FROM unnest(p_ids, p_tokens) AS u (id, token))
        ORDER BY e.id FOR UPDATE);
    SELECT coalesce(array_agg(r.id ORDER BY r.id) FILTER (WHERE r.outcome = 'done' OR e.finished), '{}'),
           array_agg(r.id ORDER BY r.id) FILTER (WHERE r.outcome = 'dead' AND NOT e.finished),
           array_agg(r.reason ORDER BY r.id) FILTER (WHERE r.outcome = 'dead' AND NOT e.finished)
    INTO v_done, v_dead, v_reasons
    FROM json_to_recordset(p_outcomes) AS r (id bigint, outcome text, reason text)
    JOIN {schema}.exceptions e ON e.id = r.id
    WHERE r.id = ANY (v_held);
    v_lanes := {schema}.lanes_of_keys(v_held);
    UPDATE {schema}.exceptions e SET
        state = CASE
            WHEN e.key IS NOT NULL AND r.outcome IN ('released', 'parked') THEN 'parked' ELSE 'waiting' END,
        token = NULL, worker_id = NULL,
        due_at = clock_timestamp() + make_interval(secs => coalesce(r.delay, 0)),
        attempts = e.attempts + CASE WHEN r.outcome IN ('retry', 'dead') THEN 1 ELSE 0 END,
        first_error = coalesce(e.first_error, r.error),
        last_error = coalesce(r.error, e.last_error)
    FROM json_to_recordset(p_outcomes) AS r (id bigint, outcome text, delay double precision, error json)
    WHERE e.id = r.id AND e.id = ANY (v_held) AND e.id <> ALL (v_done);
    PERFORM {schema}.bury(v_dead, v_reasons);
    PERFORM {schema}.complete_executions(array_agg(e.queue_id), array_agg(e.outbox_id), array_agg(e.replay_id))
    FROM {schema}.exceptions e WHERE e.id = ANY (v_done) AND e.outbox_id IS NOT NULL HAVING count(*) > 0;
    DELETE FROM {schema}.exceptions e WHERE e.id = ANY (v_done);
    PERFORM {schema}.advance_lanes(v_lanes);
    PERFORM pg_notify('{name}.work', '*')
    FROM json_to_recordset(p_outcomes) AS r (outcome text)
    WHERE r.outcome = 'released' AND pg_notification_queue_usage() < 0.5 LIMIT 1;
    RETURN QUERY SELECT unnest(v_held);
END
$body$;

-- The keys of exceptions by lane, [{"queue", "lane", "keys"}], to be advanced when the exceptions are gone.
CREATE FUNCTION {schema}.lanes_of_keys(p_ids bigint[]) RETURNS json
LANGUAGE sql STABLE SET enable_seqscan = off
BEGIN ATOMIC
    SELECT pg_catalog.json_agg(pg_catalog.json_build_object('queue', k.queue_id, 'lane', k.lane, 'keys', k.keys))
    FROM (
        SELECT e.queue_id, e.lane, pg_catalog.array_agg(DISTINCT e.key) AS keys FROM {schema}.exceptions e
        WHERE e.id = ANY (p_ids) AND e.key IS NOT NULL GROUP BY e.queue_id, e.lane
    ) k;
END;

-- Advances what lanes_of_keys has listed.
CREATE FUNCTION {schema}.advance_lanes(p_lanes json) RETURNS void
LANGUAGE sql VOLATILE
BEGIN ATOMIC
    SELECT {schema}.advance_keys(r.queue, r.lane, r.keys)
    FROM pg_catalog.json_to_recordset(p_lanes) AS r (queue integer, lane integer, keys text[])
    ORDER BY r.queue, r.lane;
END;
