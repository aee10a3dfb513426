//! The session endpoints except `generate`.
use super::fields::{Content, CreateFields, ForkFields, KeepFields, RollbackFields};
use super::shared::{arrive, refuse_known, remove};
use super::tokenizer::decoding_memory;
use crate::blocking::blocking;
use crate::error::ApiError;
use crate::extract::{Call, Path, Posted};
use crate::openai::fields::{check, read};
use crate::openai::parts::{PART_BYTES, PART_TOKENS, escaped, in_parts, items};
use crate::state::ServerState;
use axum::Json;
use axum::response::{IntoResponse, Response};
use kvist_engine::sessions::{
    History, NewSession, SessionGuard, SessionId, SessionInfo, TOOLS, Timestamp, check_length, heap_bytes,
    heap_bytes_of_fields,
};
use kvist_engine::tools::tools_from_json;
use serde_json::{Map, Value, json};
use std::iter::once;

/// The session as API clients see it.
pub(super) fn document_of(info: &SessionInfo) -> Value {
    json!({
        "id": info.id.to_string(),
        "object": "session",
        "name": info.name,
        "cache_salt": info.cache_salt,
        "created": info.created_s,
        "expires": info.expires_s,
        "n_tokens": info.n_tokens,
        "n_messages": info.n_messages,
        "parent": info.parent.map(|id| id.to_string()),
        "shared_tokens": info.shared_tokens,
        "children": info.children.iter().map(|id| id.to_string()).collect::<Vec<_>>(),
        "running": info.running,
    })
}

/// The history with `content` appended. Fails if it does not fit into the model's context or the cache.
fn grown(state: &ServerState, history: &History, content: Content) -> Result<History, ApiError> {
    let first = history.tokens.is_empty() && !history.has_messages();
    let (grown, param) = match content {
        Content { messages: Some(messages), .. } => {
            let no_messages = History::of_messages(Map::new());
            let before = if first && !history.has_messages() { &no_messages } else { history };
            (before.with_messages(state, &messages)?, "messages")
        }
        Content { text: Some(text), .. } => (history.with_text(state, &text)?, "text"),
        Content { tokens: Some(new), .. } => (history.with_tokens(state, &new, "tokens")?, "tokens"),
        _ => return Ok(history.clone()),
    };
    check_length(state, grown.tokens.len(), param)?;
    Ok(grown)
}

/// Maximum size of `chat_template_kwargs` in memory, in bytes.
const MAX_KWARGS: usize = 16 << 10;
/// Maximum size of `tools` in memory, in bytes.
const MAX_TOOLS: usize = 256 << 10;

/// Validates the tools of a session.
pub(super) fn check_tools(tools: &[Value]) -> Result<(), ApiError> {
    tools_from_json(tools)?;
    let bytes: usize = tools.iter().map(|tool| size_of::<Value>() + heap_bytes(tool)).sum();
    if bytes > MAX_TOOLS {
        let message = format!("`tools` has {bytes} bytes in memory; {MAX_TOOLS} are allowed in a session");
        return Err(ApiError::invalid("tools", message));
    }
    Ok(())
}

pub(crate) async fn create(posted: Posted) -> Result<Json<Value>, ApiError> {
    let Call { state, caller } = &posted.call;
    refuse_known(state, caller, posted.body["id"].as_str()).await?;
    let created = posted.prepare(|state, caller, body| {
        check(body, &state.schemas.sessions.create, &state.bounds.model)?;
        let (fields, content): (CreateFields, Content) = (read(body)?, read(body)?);
        if let Some(names) = &fields.chat_template_kwargs {
            let bytes = heap_bytes_of_fields(names);
            if bytes > MAX_KWARGS {
                let message =
                    format!("`chat_template_kwargs` has {bytes} bytes in memory; {MAX_KWARGS} are allowed");
                return Err(ApiError::invalid("chat_template_kwargs", message));
            }
        }
        if fields.chat_template_kwargs.as_ref().is_some_and(|names| names.contains_key(TOOLS)) {
            let message = "`chat_template_kwargs.tools` cannot be set: use `tools`";
            return Err(ApiError::invalid("chat_template_kwargs", message));
        }
        let tools = fields.tools.unwrap_or_default();
        check_tools(&tools)?;
        let empty = match (&content.messages, &fields.chat_template_kwargs) {
            (None, None) if tools.is_empty() => History::default(),
            (_, kwargs) => History::of_messages(kwargs.clone().unwrap_or_default()).with_tools(&tools),
        };
        if empty.has_messages()
            && content.messages.is_none()
            && (content.text.is_some() || content.tokens.is_some())
        {
            let name = if tools.is_empty() { "chat_template_kwargs" } else { "tools" };
            let message = format!("`{name}` applies only to sessions made of messages");
            return Err(ApiError::invalid(name, message));
        }
        let history = grown(state, &empty, content)?;
        let new = NewSession {
            name: fields.name,
            salt: caller.salt(fields.cache_salt.as_deref().unwrap_or_default()),
            cache_salt: fields.cache_salt,
            history,
        };
        let id = fields.id.as_deref().and_then(SessionId::parse);
        Ok(Json(document_of(&state.sessions.create_as(Timestamp::now(), &caller.name, id, new)?)))
    });
    created.await
}

pub(crate) async fn list(Call { state, caller }: Call) -> Result<Json<Value>, ApiError> {
    blocking(move || {
        let seen = state.sessions.list(Timestamp::now(), &caller.name);
        Ok(Json(json!({"object": "list", "data": seen.iter().map(document_of).collect::<Vec<_>>()})))
    })
    .await
}

pub(crate) async fn show(Call { state, caller }: Call, Path(id): Path<String>) -> Result<Response, ApiError> {
    let _arrival = arrive(&state, &caller, &id).await?;
    let shown = state.prepare(&caller, move |state, caller| {
        let (info, mut history) =
            state.sessions.get(Timestamp::now(), &caller.name, state.sessions.id(&id)?)?;
        history.settle(&**state)?;
        let _reserved = state.work.take(decoding_memory(state, &history.tokens), "session")?;
        let text = state.engine.model().tokenizer().map(|_| match history.tokens.as_slice() {
            [] => Ok(String::new()),
            tokens => state.decode(tokens),
        });
        let mut text = text.transpose()?;
        let bytes = text.as_ref().map_or(0, String::len);
        let is_short =
            history.tokens.len() <= PART_TOKENS && bytes.max(history.message_bytes()) <= PART_BYTES;
        if !is_short {
            if let Some(text) = &mut text {
                text.shrink_to_fit();
            }
            let bytes = bytes + history.tokens.len() * size_of::<u32>() + history.message_bytes();
            let bytes = (bytes + history.longest_message()).min(state.scores.max());
            return in_parts(
                state,
                caller,
                bytes,
                "session",
                document_parts(&document_of(&info), history, text),
            );
        }
        let mut document = document_of(&info);
        // `info` and `history` come from one snapshot, so these fields agree with the others.
        document["tokens"] = history.tokens.as_slice().into();
        document["text"] = text.into();
        document["messages"] = history.messages().into();
        Ok(Json(document).into_response())
    });
    shown.await
}

/// The same document in parts. A part is created when the client reads it.
fn document_parts(
    shown: &Value,
    history: History,
    text: Option<String>,
) -> impl Iterator<Item = String> + Send + 'static {
    let mut head = shown.to_string();
    head.pop();
    head += ",\"tokens\":[";
    let one = |part: &str| once(part.to_string());
    let text: Box<dyn Iterator<Item = String> + Send> = match text {
        Some(text) => Box::new(one("\"").chain(escaped(text)).chain(one("\""))),
        None => Box::new(one("null")),
    };
    let tokens = items(history.tokens.clone());
    let messages: Box<dyn Iterator<Item = String> + Send> = match history.n_messages() {
        Some(n) => {
            let message = move |at: usize| {
                let comma = if at > 0 { "," } else { "" };
                format!("{comma}{}", history.message(at).unwrap_or_default())
            };
            Box::new(one("[").chain((0..n).map(message)).chain(one("]")))
        }
        None => Box::new(one("null")),
    };
    let parts = once(head).chain(tokens).chain(one("],\"text\":")).chain(text);
    parts.chain(one(",\"messages\":")).chain(messages).chain(one("}"))
}

pub(crate) async fn delete(
    Call { state, caller }: Call,
    Path(id): Path<String>,
) -> Result<Json<Value>, ApiError> {
    let session = remove(&state, &caller, &id).await?;
    Ok(Json(json!({"id": session.to_string(), "object": "session.deleted", "deleted": true})))
}

/// Commits the changed history; the response says how many tokens were kept.
fn change(guard: &mut SessionGuard, history: History) -> Result<Value, ApiError> {
    let kept = guard.history.in_common(&history);
    let mut document = document_of(&guard.commit(Timestamp::now(), history)?);
    document["kept_tokens"] = kept.into();
    Ok(document)
}

pub(crate) async fn append(Path(id): Path<String>, posted: Posted) -> Result<Json<Value>, ApiError> {
    let _arrival = arrive(&posted.call.state, &posted.call.caller, &id).await?;
    let appended = posted.prepare(move |state, caller, body| {
        let id = state.sessions.id(&id)?;
        check(body, &state.schemas.sessions.append, &state.bounds.model)?;
        let mut guard = state.sessions.claim(Timestamp::now(), &caller.name, id, false)?;
        let history = grown(state, &guard.history, read(body)?)?;
        Ok(Json(change(&mut guard, history)?))
    });
    appended.await
}

pub(crate) async fn rollback(Path(id): Path<String>, posted: Posted) -> Result<Json<Value>, ApiError> {
    let _arrival = arrive(&posted.call.state, &posted.call.caller, &id).await?;
    let rolled = posted.prepare(move |state, caller, body| {
        let id = state.sessions.id(&id)?;
        check(body, &state.schemas.sessions.rollback, &state.bounds.model)?;
        let fields: RollbackFields = read(body)?;
        let mut guard = state.sessions.claim(Timestamp::now(), &caller.name, id, false)?;
        let history = guard.history.cut(&**state, fields.to.into(), "to")?;
        Ok(Json(change(&mut guard, history)?))
    });
    rolled.await
}

pub(crate) async fn fork(Path(id): Path<String>, posted: Posted) -> Result<Json<Value>, ApiError> {
    let _arrival = arrive(&posted.call.state, &posted.call.caller, &id).await?;
    let forked = posted.prepare(move |state, caller, body| {
        let id = state.sessions.id(&id)?;
        check(body, &state.schemas.sessions.fork, &state.bounds.model)?;
        let fields: ForkFields = read(body)?;
        let (_, mut history) = state.sessions.get(Timestamp::now(), &caller.name, id)?;
        match fields.at {
            Some(at) => history = history.cut(&**state, at.into(), "at")?,
            None => history.settle(&**state)?,
        }
        let n = fields.n.unwrap_or(1);
        let forks =
            state.sessions.fork(Timestamp::now(), &caller.name, id, &history, n, fields.name.as_deref())?;
        Ok(Json(json!({"object": "list", "sessions": forks.iter().map(document_of).collect::<Vec<_>>()})))
    });
    forked.await
}

pub(crate) async fn keep(Path(id): Path<String>, posted: Posted) -> Result<Json<Value>, ApiError> {
    let Posted { call: Call { state, caller }, mut body } = posted;
    let _arrival = arrive(&state, &caller, &id).await?;
    blocking(move || {
        let id = state.sessions.id(&id)?;
        check(&mut body, &state.schemas.sessions.keep, &state.bounds.model)?;
        let fields: KeepFields = read(&body)?;
        let also = fields.also.unwrap_or_default();
        // A 404 refers only to the session in the path.
        let sibling = |(i, id): (usize, &String)| {
            let unknown =
                || ApiError::invalid(format!("also[{i}]"), format!("`also[{i}]` is not a session id"));
            state.sessions.id(id).map_err(|_| unknown())
        };
        let also = also.iter().enumerate().map(sibling).collect::<Result<Vec<_>, _>>()?;
        let deleted = state.sessions.keep(Timestamp::now(), &caller.name, id, &also)?;
        let deleted: Vec<String> = deleted.iter().map(|id| id.to_string()).collect();
        Ok(Json(json!({"id": id.to_string(), "object": "session.kept", "deleted": deleted})))
    })
    .await
}
