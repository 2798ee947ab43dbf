"""The text of every call of the engine's functions, written for one schema."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Calls:
    """Statements that name their schema, so that search_path never matters."""

    tick: str
    bindings: str
    resolve: str
    fall_asleep: str
    fire_due: str
    lock_for_attach: str
    attach: str
    is_foreign: str
    declare: str
    register: str
    unregister: str
    beat: str
    claim: str
    claim_due: str
    settle: str
    settle_exceptions: str
    record_progress: str
    held: str
    release_unknown: str
    take_over: str

    @classmethod
    def for_schema(cls, schema: str) -> Calls:
        """Calls of the functions in ``schema``."""
        name = f'"{schema}"'
        return cls(
            tick=f"SELECT state, more, events, deliveries, fed, unknown, due_in FROM {name}.tick(%s, %s)",
            bindings=f"SELECT b.bindings_version, d.queue_id, d.pattern FROM {name}.bus b"
            f" LEFT JOIN ({name}.bindings d JOIN {name}.queues q ON q.id = d.queue_id AND q.state = 'active') ON true",
            resolve=f"SELECT {name}.resolve_topics(%s, %s::json)",
            fall_asleep=f"SELECT {name}.fall_asleep()",
            fire_due=f"SELECT fired, upto FROM {name}.fire_due(%s, %s)",
            lock_for_attach=f"LOCK TABLE {name}.outbox, {name}.ticks IN SHARE ROW EXCLUSIVE MODE",
            attach=f"SELECT {name}.attach(%s)",
            is_foreign=f"SELECT {name}.is_foreign()",
            declare=f"SELECT name, id FROM {name}.declare_queues(%s::json)",
            register=f"SELECT {name}.register_worker(%s::uuid, %s, %s)",
            unregister=f"SELECT {name}.unregister_worker(%s::uuid)",
            beat=f"SELECT alive, expired FROM {name}.beat(%s::uuid, %s, %s, %s::json)",
            claim="SELECT claim_id, queue_id, lane, seq, size, event_id, topic, key, payload, headers, published_at"
            f" FROM {name}.claim(%s::uuid, %s::uuid, %s::integer[], %s::integer[], %s)",
            claim_due="SELECT exception_id, queue_id, due_in, crashed_in, attempts, crashes, due_at, size, event_id,"
            " topic, key, payload, headers, published_at"
            f" FROM {name}.claim_due(%s::uuid, %s::uuid, %s::integer[], %s::integer[], %s::timestamptz[], %s, %s)",
            settle=f"SELECT settle FROM {name}.settle(%s::bigint[], %s::uuid[], %s::json)",
            settle_exceptions="SELECT settle_exceptions"
            f" FROM {name}.settle_exceptions(%s::bigint[], %s::uuid[], %s::json)",
            record_progress=f"SELECT {name}.record_progress(%s, %s::uuid, %s::bigint[], %s::json)",
            held=f"SELECT kind, id FROM {name}.held(%s::uuid, %s)",
            release_unknown=f"SELECT {name}.release_unknown(%s::uuid, %s::bigint[], %s::bigint[])",
            take_over=f"SELECT workers, deliveries FROM {name}.take_over(%s::uuid, %s, %s)",
        )
