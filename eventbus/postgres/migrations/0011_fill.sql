-- Filling: a new queue that starts with the earliest event that the outbox keeps.

-- Begins at position zero. The queue gets nothing from the relay until it has come as far as the relay.
CREATE FUNCTION {schema}.begin_filling(p_queue integer) RETURNS void
LANGUAGE plpgsql VOLATILE SET search_path = pg_catalog, pg_temp AS $body$
BEGIN
    UPDATE {schema}.queues q SET state = 'filling' WHERE q.id = p_queue;
    INSERT INTO {schema}.fillings (queue_id, snapshot, next_xid, ids_upto)
    SELECT p_queue, t.snapshot, t.next_xid, 0 FROM {schema}.ticks t ORDER BY t.id LIMIT 1;
END
$body$;
