-- Attaching to a database: is it still the one in which the relay's position was taken?

-- Whether attach() must run: the newest tick was written in another cluster or database, or xids lie in the future.
CREATE FUNCTION {schema}.is_foreign() RETURNS boolean
LANGUAGE plpgsql VOLATILE SET search_path = pg_catalog, pg_temp SET enable_seqscan = off AS $body$
DECLARE
    t {schema}.ticks%ROWTYPE;
    v_here record;
BEGIN
    SELECT * INTO STRICT t FROM {schema}.ticks ORDER BY id DESC LIMIT 1;
    SELECT * INTO STRICT v_here FROM {schema}.identity();
    RETURN (t.system_identifier, t.database_oid) <> (v_here.system_identifier, v_here.database_oid)
        OR pg_snapshot_xmax(coalesce(t.window_snapshot, t.snapshot)) > pg_snapshot_xmax(pg_current_snapshot())
        OR coalesce((SELECT o.xid >= pg_snapshot_xmax(pg_current_snapshot())
                     FROM {schema}.outbox o ORDER BY o.xid DESC LIMIT 1), false);
END
$body$;

-- Takes a new position in this database after a restore. In one REPEATABLE READ transaction whose first statement is
-- LOCK TABLE outbox, ticks IN SHARE ROW EXCLUSIVE MODE: locking takes no snapshot, so the snapshot comes after the
-- waiting. What the old position calls relayed gets an xid that every snapshot sees; what was never relayed gets
-- this transaction's xid, which the new position sees as in progress. Unless p_resume, the bus is paused when there
-- is anything that it could send. Returns 'attached', 'resumed' or 'paused'.
CREATE FUNCTION {schema}.attach(p_resume boolean) RETURNS text
LANGUAGE plpgsql VOLATILE SET search_path = pg_catalog, pg_temp AS $body$
DECLARE
    t {schema}.ticks%ROWTYPE;
    v_here record;
    v_snapshot pg_snapshot := pg_current_snapshot();
    v_xid xid8;
    v_upto bigint;
    v_table text;
BEGIN
    IF current_setting('transaction_isolation') <> 'repeatable read' OR pg_current_xact_id_if_assigned() IS NOT NULL
    THEN
        RAISE invalid_transaction_state USING MESSAGE =
            'eventbus: attach needs a REPEATABLE READ transaction that has only locked outbox and ticks';
    END IF;
    IF NOT {schema}.is_foreign() THEN
        RETURN 'attached';
    END IF;
    SELECT * INTO STRICT t FROM {schema}.ticks ORDER BY id DESC LIMIT 1;
    SELECT * INTO STRICT v_here FROM {schema}.identity();
    v_xid := pg_current_xact_id();
    UPDATE {schema}.outbox o SET xid = CASE WHEN r.relayed THEN '2'::xid8 ELSE v_xid END
    FROM (
        SELECT x.id, (
                (x.id <= t.ids_upto AND pg_visible_in_snapshot(x.xid, t.snapshot))
                OR (t.window_snapshot IS NOT NULL AND x.id <= t.last_id
                    AND pg_visible_in_snapshot(x.xid, t.window_snapshot))
            ) AND NOT (x.published_at > t.created_at
                AND NOT EXISTS (SELECT 1 FROM {schema}.deliveries d WHERE d.outbox_id = x.id)) AS relayed
        FROM {schema}.outbox x
    ) r
    WHERE r.id = o.id AND (NOT r.relayed OR NOT pg_visible_in_snapshot(o.xid, v_snapshot));
    FOREACH v_table IN ARRAY ARRAY[
        'outbox', 'scheduled', 'queues', 'topics', 'replays', 'claims', 'exceptions', 'dead_letters']
    LOOP
        EXECUTE format(
            'SELECT setval(%1$L::regclass, greatest(m.id, s.last_value), s.is_called OR m.id IS NOT NULL)'
            ' FROM {schema}.%3$I s, (SELECT greatest(max(x.id), nullif($1, 0)) AS id FROM {schema}.%2$I x) m',
            '{schema}.' || v_table || '_id_seq', v_table, v_table || '_id_seq')
        USING CASE v_table WHEN 'outbox' THEN greatest(t.ids_upto, t.window_ids_upto) ELSE 0 END;
    END LOOP;
    SELECT CASE WHEN s.is_called THEN s.last_value ELSE 0 END INTO v_upto FROM {schema}.outbox_id_seq s;
    INSERT INTO {schema}.ticks (id, snapshot, next_xid, ids_upto, system_identifier, database_oid)
    VALUES (t.id + 1, v_snapshot, v_xid, v_upto, v_here.system_identifier, v_here.database_oid);
    UPDATE {schema}.fillings SET snapshot = v_snapshot, next_xid = v_xid, ids_upto = 0, window_snapshot = NULL,
        window_next_xid = NULL, window_ids_upto = NULL, last_id = 0, restored = true;
    IF p_resume OR NOT (
        EXISTS (SELECT 1 FROM {schema}.outbox o WHERE o.xid = v_xid)
        OR EXISTS (SELECT 1 FROM {schema}.scheduled)
        OR EXISTS (SELECT 1 FROM {schema}.fillings)
        OR EXISTS (SELECT 1 FROM {schema}.exceptions)
        OR EXISTS (SELECT 1 FROM {schema}.claims c
                   WHERE NOT EXISTS (SELECT 1 FROM {schema}.settlements s WHERE s.claim_id = c.id))
        OR EXISTS (
            SELECT 1 FROM {schema}.queues q
            WHERE coalesce((SELECT max(d.seq) FROM {schema}.deliveries d WHERE d.queue_id = q.id), 0)
                > coalesce((SELECT max(c.hi) FROM {schema}.claims c WHERE c.queue_id = q.id), 0))
    ) THEN
        RETURN 'resumed';
    END IF;
    UPDATE {schema}.bus SET state = 'paused', changed_at = clock_timestamp(),
        reason = 'this database is a copy that was restored elsewhere; its events have not been sent from here';
    RETURN 'paused';
END
$body$;
