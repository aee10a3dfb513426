//! `/openapi.json` (OpenAPI 3.1): the schemas that request bodies are checked against, and the responses.
use crate::openai::request::Bounds;
use crate::schemas::Schemas;
use serde_json::{Map, Value, json};

/// The OpenAPI document of one server. It contains the server's model and limits.
pub(crate) fn document(bounds: &Bounds, schemas: &Schemas) -> Value {
    let mut paths = Map::new();
    let mut path = |path: &str, verb: &str, operation: Value| {
        let entry = paths.entry(path).or_insert_with(|| json!({}));
        entry[verb] = operation;
    };
    // OpenAPI 3.1 cannot describe the items of a stream. Tools that check streams read the schema as that of one event.
    let event = json!({
        "description": "One event. Its data is a chunk, an error, or [DONE] at the end.",
        "type": "object", "required": ["data"], "properties": {"data": {"type": "string"}},
    });
    let streamed = json!({"text/event-stream": {"schema": event}});
    path("/v1/completions", "post", posts("Continue a text", "Completions", "Completion", &streamed));
    path("/v1/chat/completions", "post", posts("Answer a conversation", "Chat", "ChatCompletion", &streamed));
    let rendered = "The prompts of a completion as tokens (vLLM)";
    path("/v1/completions/render", "post", posts(rendered, "Completions", "RenderedPrompts", &json!({})));
    let rendered = "The prompt of a conversation as tokens (vLLM)";
    path("/v1/chat/completions/render", "post", posts(rendered, "Chat", "RenderedPrompt", &json!({})));
    path("/tokenize", "post", posts("Text to tokens", "Tokenize", "Tokens", &json!({})));
    path("/detokenize", "post", posts("Tokens to text", "Detokenize", "Detokenized", &json!({})));
    path("/v1/models", "get", gets("List the models; there is one", "ModelList", &["401"]));
    let mut model = gets("One model", "Model", &["400", "401", "404"]);
    model["parameters"] = json!([{
        "name": "model", "in": "path", "required": true, "description": format!("`{}`", bounds.model),
        "schema": {"type": "string"}, "example": bounds.model,
    }]);
    path("/v1/models/{model}", "get", model);
    let drops = "Drop what the cache has of this key's prompts, except blocks that running requests use";
    let mut forget = gets(drops, "CacheDeleted", &["400", "401", "429"]);
    forget["parameters"] = json!([{
        "name": "cache_salt", "in": "query", "required": false, "description": "Of the requests; by default none",
        "schema": {"type": "string"}, "example": "",
    }]);
    path("/v1/cache", "delete", forget);
    path(
        "/v1/cache",
        "get",
        gets("The capacity of the cache and its use; for admin keys only", "Cache", &["401"]),
    );
    let resized = "Give the cache another capacity, while requests run; for admin keys only";
    let mut resize = posts(resized, "CacheResize", "Cache", &json!({}));
    resize["responses"]["409"] = reference("responses", "409");
    path("/v1/cache", "post", resize);
    sessions(&mut path, &streamed);
    path("/get_server_info", "get", gets("What routers ask a worker", "ServerInfo", &["401"]));
    path(
        "/kv_event_sources",
        "get",
        gets("Where KV events are published (vLLM)", "KvEventSources", &["401", "404"]),
    );
    path("/health", "get", open(gets("The process is up and can compute", "Status", &["503"])));
    path("/ready", "get", open(gets("The server accepts new requests", "Status", &["503"])));
    path("/version", "get", open(gets("kvist's version (vLLM)", "Version", &[])));
    let mut metrics = gets(
        "Prometheus metrics; if API keys are configured, for admin keys only",
        "Status",
        &["401", "403"],
    );
    metrics["responses"]["200"] = json!({"description": "Text format 0.0.4", "content": {"text/plain": {"schema": {"type": "string"}}}});
    path("/metrics", "get", metrics);
    let mut itself = open(gets("This document", "Status", &[]));
    itself["responses"]["200"] = json!({"description": "OpenAPI 3.1", "content": {"application/json": {"schema": {"type": "object"}}}});
    path("/openapi.json", "get", itself);
    json!({
        "openapi": "3.1.0",
        "info": {
            "title": "kvist",
            "version": env!("CARGO_PKG_VERSION"),
            "description": "The OpenAI API over one model. Unsupported fields are never ignored: the request is \
                            refused with an error that names the field.",
        },
        "paths": paths,
        "security": [{}, {"key": []}],
        "components": {
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
            "schemas": components(schemas),
            "responses": responses(),
        },
    })
}

/// Paths of sessions.
fn sessions(path: &mut impl FnMut(&str, &str, Value), streamed: &Value) {
    let id = json!([{
        "name": "id", "in": "path", "required": true, "description": "The id of a session of this key",
        "schema": {"type": "string"}, "example": "sess-00000000000000000000000000000000",
    }]);
    let of_one = |mut operation: Value| {
        operation["parameters"] = id.clone();
        operation
    };
    let changes = |mut operation: Value| {
        for status in ["409", "424"] {
            operation["responses"][status] = reference("responses", status);
        }
        of_one(operation)
    };
    let none = json!({});
    path("/v1/sessions", "get", gets("The sessions of this key", "SessionList", &["401"]));
    let mut creates = posts("Create a session", "SessionCreate", "Session", &none);
    creates["responses"]["409"] = reference("responses", "409");
    path("/v1/sessions", "post", creates);
    let load = "Create a session from a file that this key saved";
    path("/v1/sessions/load", "post", posts(load, "SessionFile", "Loaded", &none));
    // Another worker's session counts against this one's quotas, and its store may not answer.
    let all = ["400", "401", "404", "424", "429", "503"];
    // A long history takes time and memory to render.
    let looked = [&all[..], &["408"]].concat();
    path("/v1/sessions/{id}", "get", of_one(gets("A session, with its history", "SessionHistory", &looked)));
    path("/v1/sessions/{id}", "delete", of_one(gets("Delete a session; its forks remain", "Deleted", &all)));
    let verbs = [
        ("append", "Append to the history", "SessionAppend", "Session", &none),
        (
            "generate",
            "Generate; the output becomes part of the session",
            "SessionGenerate",
            "Generation",
            streamed,
        ),
        ("fork", "Create sessions that share the history up to a position", "SessionFork", "Forks", &none),
        ("rollback", "Truncate the history", "SessionRollback", "Session", &none),
        (
            "keep",
            "Keep this session: delete the other forks of the same call, and their forks",
            "SessionKeep",
            "Kept",
            &none,
        ),
        (
            "save",
            "Save the session in a file, with its K and V; the server has to have a directory for sessions",
            "SessionFile",
            "Saved",
            &none,
        ),
    ];
    for (verb, summary, body, answer, other_types) in verbs {
        path(
            &format!("/v1/sessions/{{id}}/{verb}"),
            "post",
            changes(posts(summary, body, answer, other_types)),
        );
    }
}

fn reference(kind: &str, name: &str) -> Value {
    json!({"$ref": format!("#/components/{kind}/{name}")})
}

fn answered(schema: &str, other_types: &Value) -> Value {
    let mut content = json!({"application/json": {"schema": reference("schemas", schema)}});
    for (kind, schema) in other_types.as_object().into_iter().flatten() {
        content[kind] = schema.clone();
    }
    json!({"description": "Done", "content": content})
}

fn posts(summary: &str, body: &str, answer: &str, other_types: &Value) -> Value {
    let mut all = json!({"200": answered(answer, other_types)});
    for status in ["400", "401", "403", "404", "408", "413", "415", "429", "500", "503"] {
        all[status] = reference("responses", status);
    }
    json!({
        "summary": summary,
        "requestBody": {
            "required": true,
            "content": {"application/json": {"schema": reference("schemas", body)}},
        },
        "responses": all,
    })
}

fn gets(summary: &str, answer: &str, errors: &[&str]) -> Value {
    let mut all = json!({"200": answered(answer, &json!({}))});
    for status in errors.iter().chain(&["403"]) {
        all[*status] = reference("responses", status);
    }
    json!({"summary": summary, "responses": all})
}

/// The operation needs no API key.
fn open(mut operation: Value) -> Value {
    operation["security"] = json!([]);
    operation
}

fn responses() -> Value {
    let retry = json!({"Retry-After": {"schema": {"type": "integer"}, "description": "Seconds"}});
    let all = [
        (
            "400",
            "The request is invalid or asks for an unsupported feature; `error.param` names the field",
            false,
        ),
        ("401", "No API key, or an unknown one", false),
        ("403", "Not allowed for this key, or not under this host name", false),
        ("404", "No such model, session or path", false),
        (
            "409",
            "The state does not allow this: the session is generating, is empty, was not forked, or exists already; a \
             request needs a larger cache",
            false,
        ),
        ("408", "The body arrived too slowly, or the request's deadline passed", false),
        ("413", "The body is too large", false),
        ("415", "The body is not sent as application/json, or is compressed", false),
        ("424", "The session may be on another worker, and the shared store does not answer", true),
        (
            "429",
            "The queue is full for this key, a quota of sessions or deletions is used up, or too many deletions wait for a \
             shared store that does not answer",
            true,
        ),
        ("500", "The model or its cache failed", false),
        (
            "503",
            "The server is shutting down, or has reached a limit on connections, large bodies or unread answers",
            true,
        ),
    ];
    let mut responses = Map::new();
    for (status, description, retries) in all {
        let mut response = json!({
            "description": description,
            "content": {"application/json": {"schema": reference("schemas", "Error")}},
        });
        if retries {
            response["headers"] = retry.clone();
        }
        if ["408", "429"].contains(&status) {
            response["headers"]["x-should-retry"] = json!({"schema": {"type": "string", "enum": ["false"]},
                "description": "Present if a retry would give the same error"});
        }
        responses.insert(status.into(), response);
    }
    Value::Object(responses)
}

fn text() -> Value {
    json!({"type": "string"})
}
fn count() -> Value {
    json!({"type": "integer", "minimum": 0})
}
fn rendered_prompt() -> Value {
    object(&["token_ids"], json!({"token_ids": {"type": "array", "items": count()}}))
}
fn maybe(kind: &str) -> Value {
    json!({"type": [kind, "null"]})
}
fn object(required: &[&str], properties: Value) -> Value {
    json!({"type": "object", "required": required, "properties": properties})
}

/// The schemas of sessions, then those of everything else, in the order in which the document lists them.
fn components(schemas: &Schemas) -> Value {
    let mut all = session_components(schemas);
    if let (Some(all), Value::Object(others)) = (all.as_object_mut(), other_components(schemas)) {
        all.extend(others);
    }
    all
}

fn session_components(schemas: &Schemas) -> Value {
    let of_sessions = &schemas.sessions;
    let session = json!({
        "id": text(), "object": text(), "name": maybe("string"), "cache_salt": maybe("string"),
        "created": count(), "expires": count(), "n_tokens": count(), "n_messages": maybe("integer"),
        "parent": maybe("string"), "shared_tokens": count(), "running": {"type": "boolean"},
        "children": {"type": "array", "items": text()},
    });
    let with_fields = |more: Value| {
        let mut all = session.clone();
        for (name, field) in more.as_object().into_iter().flatten() {
            all[name] = field.clone();
        }
        let required: Vec<&str> =
            session.as_object().into_iter().flatten().map(|(name, _)| name.as_str()).collect();
        object(&required, all)
    };
    let placed = object(
        &["message", "begins", "open"],
        json!({"message": {"type": "object"}, "begins": maybe("integer"), "open": {"type": "boolean"}}),
    );
    let listed = || json!({"type": "array", "items": reference("schemas", "Session")});
    json!({
        "RenderedPrompt": rendered_prompt(),
        "RenderedPrompts": {"type": "array", "items": rendered_prompt()},
        "ServerInfo": object(
            &["model_id", "served_model_name", "instance_id", "is_generation", "kv_block_size", "max_model_len", "version"],
            json!({
                "model_id": text(), "served_model_name": text(), "instance_id": text(), "is_generation": {"type": "boolean"},
                "kv_block_size": count(), "max_model_len": count(), "version": text(),
            }),
        ),
        "KvEventSources": {"type": "object", "additionalProperties": {"type": "object"}},
        "SessionCreate": of_sessions.create,
        "SessionAppend": of_sessions.append,
        "SessionGenerate": of_sessions.generate,
        "SessionFork": of_sessions.fork,
        "SessionRollback": of_sessions.rollback,
        "SessionKeep": of_sessions.keep,
        "SessionFile": of_sessions.save,
        "Saved": object(
            &["id", "object", "file", "n_tokens", "stored_tokens"],
            json!({"id": text(), "object": text(), "file": text(), "n_tokens": count(), "stored_tokens": count()}),
        ),
        "Loaded": with_fields(json!({"stored_tokens": count()})),
        "Session": with_fields(json!({"kept_tokens": count()})),
        "SessionHistory": with_fields(json!({
            "tokens": {"type": "array", "items": count()},
            "text": maybe("string"),
            "messages": {"type": ["array", "null"], "items": placed},
        })),
        "SessionList": object(&["object", "data"], json!({"object": text(), "data": listed()})),
        "Forks": object(&["object", "sessions"], json!({"object": text(), "sessions": listed()})),
        "Kept": object(
            &["id", "object", "deleted"],
            json!({"id": text(), "object": text(), "deleted": {"type": "array", "items": text()}}),
        ),
        "Deleted": object(
            &["id", "object", "deleted"],
            json!({"id": text(), "object": text(), "deleted": {"type": "boolean"}}),
        ),
        "Cache": object(
            &["object", "tokens", "used_tokens", "evictable_tokens", "retained_tokens", "bytes_per_token", "bytes"],
            json!({
                "object": text(), "tokens": count(), "used_tokens": count(), "evictable_tokens": count(),
                "retained_tokens": count(), "bytes_per_token": count(), "bytes": count(),
            }),
        ),
        "CacheDeleted": object(
            &["object", "cache_salt", "deleted_blocks", "pending_tiers"],
            json!({
                "object": text(), "cache_salt": text(), "deleted_blocks": count(),
                "pending_tiers": {"type": "array", "items": text()},
            }),
        ),
    })
}

// Over 80 lines: one list of fields, schema by schema.
fn other_components(schemas: &Schemas) -> Value {
    let finish = || json!({"type": "string", "enum": ["stop", "length", "tool_calls"]});
    let answer = |choice: Value| {
        object(
            &["id", "object", "created", "model", "choices", "usage"],
            json!({
                "id": text(), "object": text(), "created": count(), "model": text(),
                "choices": {"type": "array", "items": choice},
                "usage": reference("schemas", "Usage"),
                "kvist": {"type": "object"},
            }),
        )
    };
    let message =
        json!({"role": text(), "content": {"type": ["string", "null"]}, "reasoning_content": text()});
    let message = object(&["role", "content"], message);
    let scores = json!({"type": ["object", "null"]});
    let generation =
        answer(object(&["index", "finish_reason"], json!({"index": count(), "finish_reason": finish()})));
    json!({
        "Generation": generation,
        "Completions": schemas.completions,
        "Chat": schemas.chat,
        "CacheResize": schemas.cache,
        "Tokenize": schemas.tokenize,
        "Detokenize": schemas.detokenize,
        "Completion": answer(object(
            &["index", "text", "logprobs", "finish_reason"],
            json!({"index": count(), "text": text(), "logprobs": scores, "finish_reason": finish()}),
        )),
        "ChatCompletion": answer(object(
            &["index", "message", "logprobs", "finish_reason"],
            json!({"index": count(), "message": message, "logprobs": scores, "finish_reason": finish()}),
        )),
        "Usage": object(
            &["prompt_tokens", "completion_tokens", "total_tokens", "prompt_tokens_details"],
            json!({
                "prompt_tokens": count(), "completion_tokens": count(), "total_tokens": count(),
                "prompt_tokens_details": object(&["cached_tokens"], json!({"cached_tokens": count()})),
                // Only if the server speculates.
                "completion_tokens_details": object(
                    &["accepted_prediction_tokens", "rejected_prediction_tokens"],
                    json!({"accepted_prediction_tokens": count(), "rejected_prediction_tokens": count()}),
                ),
            }),
        ),
        "Tokens": object(
            &["count", "max_model_len", "tokens"],
            json!({"count": count(), "max_model_len": count(), "tokens": {"type": "array", "items": count()}}),
        ),
        "Detokenized": object(&["prompt"], json!({"prompt": text()})),
        "Model": object(
            &["id", "object", "created", "owned_by"],
            json!({
                "id": text(), "object": text(), "created": count(), "owned_by": text(), "max_model_len": count(),
                "chat_template": {"type": "boolean", "description":
                    "The model has a chat template. A model without one continues plain text."},
            }),
        ),
        "ModelList": object(
            &["object", "data"],
            json!({"object": text(), "data": {"type": "array", "items": reference("schemas", "Model")}}),
        ),
        "Version": object(&["version"], json!({"version": text()})),
        "Status": object(&["status"], json!({"status": text()})),
        "Error": object(
            &["error"],
            json!({"error": object(
                &["message", "type", "param", "code"],
                json!({"message": text(), "type": text(), "param": {"type": ["string", "null"]}, "code": text()}),
            )}),
        ),
    })
}
