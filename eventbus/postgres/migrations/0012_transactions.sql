-- Transactional handlers: their transaction also says that its deliveries are done.

-- Completes deliveries of one queue inside the transaction of their handler; the last statement before its commit. Each
-- delivery is one of a claim (p_claims, p_claim_tokens, p_seqs) or an exception (p_exceptions, p_exception_tokens); and
-- each has its execution in p_event_ids, p_replays. SQLSTATEs, after all of which the transaction must roll back:
--
-- EB003     a lease is not held any more, or was exchanged for another one. Also 23505: somebody else has recorded the
--           delivery (a take-over, detach, a settlement), maybe after this transaction took its snapshot.
-- EB004     an execution is completed by another delivery of the same event, or twice in this call.
-- EB005     this is not the transaction that began with p_mark: the handler has ended that one.
--
-- The handler chooses the isolation level, so nothing here relies on a fresh snapshot: the keys of progress and
-- processed_events decide. Nothing is read that a serializable transaction writes (claims are only written by READ
-- COMMITTED ones), so that serializable handlers do not fail because of each other's bookkeeping: that is why the rows
-- of exceptions are found by an INSERT that conflicts with them. Finding them by an index, as an UPDATE does, would be a
-- read of a page into which others write. One that is not there any more is inserted, and gone again with EB003. In the
-- order of the keys, like everybody who writes these tables.
--
-- The claim itself was committed asynchronously. A crash of the server that loses it has lost this transaction before:
-- this commit is synchronous and comes later in the WAL. When the settlement that follows is lost, the claim is open
-- again, and the row in progress, which was not lost, keeps the delivery from running again.
CREATE FUNCTION {schema}.complete(p_mark text, p_claims bigint[], p_claim_tokens uuid[], p_seqs bigint[],
                                  p_exceptions bigint[], p_exception_tokens uuid[],
                                  p_queue integer, p_event_ids uuid[], p_replays integer[]) RETURNS void
LANGUAGE plpgsql VOLATILE
SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off
SET plan_cache_mode = force_generic_plan AS $body$
DECLARE
    v_count integer;
BEGIN
    IF current_setting('eventbus.delivery', true) IS DISTINCT FROM p_mark THEN
        RAISE EXCEPTION 'eventbus: the handler ended the transaction of the bus; leave COMMIT and ROLLBACK to the bus'
            USING ERRCODE = 'EB005';
    END IF;
    PERFORM set_config('synchronous_commit', 'on', true) WHERE current_setting('synchronous_commit') = 'off';
    IF cardinality(p_claims) > 0 THEN
        INSERT INTO {schema}.progress (claim_id, seq, outcome)
        SELECT c.id, u.seq, 'done' FROM unnest(p_claims, p_claim_tokens, p_seqs) AS u (id, token, seq)
        CROSS JOIN LATERAL (
            SELECT c.id FROM {schema}.claims c
            WHERE c.id = u.id AND c.token = u.token AND u.seq BETWEEN c.lo AND c.hi OFFSET 0) c
        ORDER BY c.id, u.seq;
        GET DIAGNOSTICS v_count = ROW_COUNT;
        IF v_count < cardinality(p_claims) THEN
            RAISE EXCEPTION 'eventbus: the claim of this delivery is gone' USING ERRCODE = 'EB003';
        END IF;
    END IF;
    IF cardinality(p_exceptions) > 0 THEN
        WITH written AS (
            INSERT INTO {schema}.exceptions AS e (id, due_at, seq, outbox_id, queue_id, lane, attempts, state, token,
                                                  worker_id) OVERRIDING SYSTEM VALUE
            SELECT u.id, '-infinity', 0, 0, p_queue, 0, -1, 'claimed', u.token, u.token
            FROM unnest(p_exceptions, p_exception_tokens) AS u (id, token) ORDER BY u.id
            ON CONFLICT (id) DO UPDATE SET finished = true WHERE e.token = excluded.token AND NOT e.finished
            RETURNING e.attempts
        )
        SELECT count(*) INTO v_count FROM written w WHERE w.attempts >= 0;
        IF v_count < cardinality(p_exceptions) THEN
            RAISE EXCEPTION 'eventbus: this delivery is not held any more' USING ERRCODE = 'EB003';
        END IF;
    END IF;
    INSERT INTO {schema}.processed_events AS p (queue_id, event_id, replay_id, completed_at)
    SELECT DISTINCT ON (u.event_id, u.replay_id) p_queue, u.event_id, u.replay_id, clock_timestamp()
    FROM unnest(p_event_ids, p_replays) AS u (event_id, replay_id)
    ORDER BY u.event_id, u.replay_id
    ON CONFLICT (queue_id, event_id, replay_id) DO UPDATE SET completed_at = excluded.completed_at, owner = NULL
    WHERE p.completed_at IS NULL;
    GET DIAGNOSTICS v_count = ROW_COUNT;
    IF v_count < cardinality(p_event_ids) THEN
        RAISE EXCEPTION 'eventbus: this event has been completed already' USING ERRCODE = 'EB004';
    END IF;
END
$body$;

-- What RESET and DISCARD do not undo in a session that other handlers use later: its advisory locks, and the statements
-- that were prepared by name. Those that the driver has prepared stay.
CREATE FUNCTION {schema}.forget_session() RETURNS void
LANGUAGE plpgsql VOLATILE SET search_path = pg_catalog, pg_temp AS $body$
DECLARE
    v_name text;
BEGIN
    PERFORM pg_advisory_unlock_all();
    FOR v_name IN SELECT s.name FROM pg_prepared_statements s WHERE s.from_sql LOOP
        EXECUTE format('DEALLOCATE %I', v_name);
    END LOOP;
END
$body$;
