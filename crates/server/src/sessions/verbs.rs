//! The session endpoints except `generate`.
use super::fields::{Content, CreateFields, ForkFields, KeepFields, RollbackFields};
use super::history::{History, HistoryTokenizer, TOOLS, admit, weight, weight_of_names};
use super::store::{Draft, Moment, Seen, SessionGuard};
use crate::app::App;
use crate::auth::Caller;
use crate::error::ApiError;
use crate::http::{Path, blocking, json_body};
use crate::openai::chat::{message, render};
use crate::openai::fields::{check, read};
use crate::openai::tokens::{self, PART_BYTES, PART_TOKENS, escaped, in_parts, items};
use crate::tools::{Reading, ToolFormat, tools_from_json};
use axum::extract::{Request, State};
use axum::response::{IntoResponse, Response};
use axum::{Extension, Json};
use kvist_model::template::Conversation;
use kvist_model::tokenizer::Ends;
use serde_json::{Map, Value, json};
use std::iter::once;
use std::sync::Arc;
use std::time::Instant;

pub(super) fn moment(app: &App) -> Moment {
    Moment { instant: Instant::now(), unix_s: app.now() }
}

impl HistoryTokenizer for App {
    fn render(
        &self,
        messages: &[Value],
        kwargs: &Map<String, Value>,
        answer: bool,
    ) -> Result<String, ApiError> {
        let Some(tools) = kwargs.get(TOOLS).and_then(Value::as_array) else {
            let conversation = Conversation { messages, tools: &[], add_generation_prompt: answer, kwargs };
            return render(self, &conversation);
        };
        let mut kwargs = kwargs.clone();
        kwargs.shift_remove(TOOLS);
        let conversation = Conversation { messages, tools, add_generation_prompt: answer, kwargs: &kwargs };
        render(self, &conversation)
    }

    fn encode_rendered(&self, text: &str, first: bool) -> Result<Ends, ApiError> {
        tokens::refuse_long(self, text, "messages")?;
        // The model's own template writes the BOS token itself.
        let model = self.engine.model();
        let special = first && model.chat_template().is_none();
        tokens::encode_with_ends(self, text, special, "messages")
    }

    fn encode(&self, text: &str, first: bool) -> Result<Vec<u32>, ApiError> {
        tokens::encode_prompt(self, text, first, "text")
    }

    fn room(&self) -> usize {
        self.bounds.max_tokens as usize
    }

    fn decode(&self, tokens: &[u32]) -> Result<String, ApiError> {
        if tokens.is_empty() {
            return Ok(String::new());
        }
        let _taken = self.work.take(decoding_room(self, tokens), "session")?;
        self.decode_answer(tokens)
    }

    fn context(&self, tokens: &[u32]) -> usize {
        let end = self.engine.model().tokenizer().map_or(tokens, |t| t.context_of(tokens));
        tokens.len() - end.len()
    }

    fn content(&self, answer: &str) -> String {
        // The plain template writes a space before an answer; the model generated that space here.
        let plain = self.engine.model().chat_template().is_none();
        let answer = if plain { answer.strip_prefix(' ').unwrap_or(answer) } else { answer };
        answer.into()
    }

    fn message(&self, answer: &str) -> Value {
        if !self.channels {
            return json!({"role": "assistant", "content": self.content(answer)});
        }
        // Parse no tool calls here: only the generation that produced them knows whether calls were allowed.
        let reading =
            Reading { format: ToolFormat::Harmony, tools: Arc::default(), parallel: true, calls: false };
        message(&reading.reader().whole(answer), Vec::new())
    }
}

/// Memory in bytes for decoding these tokens, limited to all there is, so that every session that was accepted
/// can also be shown.
pub(super) fn decoding_room(app: &App, tokens: &[u32]) -> usize {
    tokens::decoding_bytes(app, tokens).min(app.work.bytes())
}

/// The session as API clients see it.
fn show(seen: &Seen) -> Value {
    json!({
        "id": seen.id.to_string(),
        "object": "session",
        "name": seen.name,
        "cache_salt": seen.cache_salt,
        "created": seen.created_s,
        "expires": seen.expires_s,
        "n_tokens": seen.n_tokens,
        "n_messages": seen.n_messages,
        "parent": seen.parent.map(|id| id.to_string()),
        "shared_tokens": seen.shared_tokens,
        "children": seen.children.iter().map(|id| id.to_string()).collect::<Vec<_>>(),
        "running": seen.running,
    })
}

/// The history with `content` appended. Fails if it exceeds what the model or the cache can hold.
fn grown(app: &App, history: &History, content: Content) -> Result<History, ApiError> {
    let first = history.tokens.is_empty() && !history.has_messages();
    let (grown, param) = match content {
        Content { messages: Some(messages), .. } => {
            let begun = History::of_messages(Map::new());
            let before = if first && !history.has_messages() { &begun } else { history };
            (before.with_messages(app, &messages)?, "messages")
        }
        Content { text: Some(text), .. } => {
            let new = app.encode(&text, history.tokens.is_empty())?;
            (history.with_tokens(app, &new, "text")?, "text")
        }
        Content { tokens: Some(new), .. } => (history.with_tokens(app, &new, "tokens")?, "tokens"),
        _ => return Ok(history.clone()),
    };
    admit(app, grown.tokens.len(), param)?;
    Ok(grown)
}

/// Maximum size of `chat_template_kwargs` in memory, in bytes.
const MAX_NAMES: usize = 16 << 10;
/// Maximum size of `tools` in memory, in bytes.
const MAX_TOOLS: usize = 256 << 10;

/// Validates the tools of a session.
pub(super) fn known_tools(tools: &[Value]) -> Result<(), ApiError> {
    tools_from_json(tools)?;
    let bytes: usize = tools.iter().map(|tool| size_of::<Value>() + weight(tool)).sum();
    if bytes > MAX_TOOLS {
        let message = format!("`tools` has {bytes} bytes in memory; {MAX_TOOLS} are allowed in a session");
        return Err(ApiError::invalid("tools", message));
    }
    Ok(())
}

pub(crate) async fn create(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    request: Request,
) -> Result<Json<Value>, ApiError> {
    let mut body = json_body(&app, request).await?;
    let created = app.prepare(&caller, move |app, caller| {
        check(&mut body, &app.schemas.sessions.create, &app.bounds.model)?;
        let (fields, content): (CreateFields, Content) = (read(&body)?, read(&body)?);
        if let Some(names) = &fields.chat_template_kwargs {
            let bytes = weight_of_names(names);
            if bytes > MAX_NAMES {
                let message =
                    format!("`chat_template_kwargs` has {bytes} bytes in memory; {MAX_NAMES} are allowed");
                return Err(ApiError::invalid("chat_template_kwargs", message));
            }
        }
        if fields.chat_template_kwargs.as_ref().is_some_and(|names| names.contains_key(TOOLS)) {
            let message = "`chat_template_kwargs.tools` is not to be set: `tools` gives it";
            return Err(ApiError::invalid("chat_template_kwargs", message));
        }
        let tools = fields.tools.unwrap_or_default();
        known_tools(&tools)?;
        let empty = match (&content.messages, &fields.chat_template_kwargs) {
            (None, None) if tools.is_empty() => History::default(),
            (_, kwargs) => History::of_messages(kwargs.clone().unwrap_or_default()).with_tools(&tools),
        };
        if empty.has_messages()
            && content.messages.is_none()
            && (content.text.is_some() || content.tokens.is_some())
        {
            let name = if tools.is_empty() { "chat_template_kwargs" } else { "tools" };
            let message = format!("`{name}` is for sessions made of messages");
            return Err(ApiError::invalid(name, message));
        }
        let history = grown(app, &empty, content)?;
        let draft = Draft {
            name: fields.name,
            salt: caller.salt(fields.cache_salt.as_deref().unwrap_or_default()),
            cache_salt: fields.cache_salt,
            history,
        };
        Ok(Json(show(&app.sessions.create(moment(app), &caller.name, draft)?)))
    });
    created.await
}

pub(crate) async fn list(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
) -> Result<Json<Value>, ApiError> {
    blocking(move || {
        let seen = app.sessions.list(moment(&app), &caller.name);
        Ok(Json(json!({"object": "list", "data": seen.iter().map(show).collect::<Vec<_>>()})))
    })
    .await
}

pub(crate) async fn look(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    Path(id): Path<String>,
) -> Result<Response, ApiError> {
    let looked = app.prepare(&caller, move |app, caller| {
        let (seen, mut history) = app.sessions.look(moment(app), &caller.name, app.sessions.id(&id)?)?;
        history.settle(&**app)?;
        let _taken = app.work.take(decoding_room(app, &history.tokens), "session")?;
        let text = app.engine.model().tokenizer().map(|_| match history.tokens.as_slice() {
            [] => Ok(String::new()),
            tokens => app.decode(tokens),
        });
        let mut text = text.transpose()?;
        let bytes = text.as_ref().map_or(0, String::len);
        let is_short = history.tokens.len() <= PART_TOKENS && bytes.max(history.said_bytes()) <= PART_BYTES;
        if !is_short {
            if let Some(text) = &mut text {
                text.shrink_to_fit();
            }
            let bytes = bytes + history.tokens.len() * size_of::<u32>() + history.said_bytes();
            let bytes = (bytes + history.longest_message()).min(app.scores.most());
            return in_parts(app, caller, bytes, "session", document_parts(&show(&seen), history, text));
        }
        let mut document = show(&seen);
        // `seen` and `history` come from one snapshot, so these fields agree with the others.
        document["tokens"] = history.tokens.as_slice().into();
        document["text"] = text.into();
        document["messages"] = history.messages().into();
        Ok(Json(document).into_response())
    });
    looked.await
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
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    Path(id): Path<String>,
) -> Result<Json<Value>, ApiError> {
    blocking(move || {
        let session = app.sessions.id(&id)?;
        app.sessions.delete(moment(&app), &caller.name, session)?;
        Ok(Json(json!({"id": session.to_string(), "object": "session.deleted", "deleted": true})))
    })
    .await
}

/// Commits the changed history; the response says how many tokens were kept.
fn change(app: &App, claim: &mut SessionGuard, history: History) -> Result<Value, ApiError> {
    let kept = claim.history.in_common(&history);
    let mut document = show(&claim.commit(moment(app), history)?);
    document["kept_tokens"] = kept.into();
    Ok(document)
}

pub(crate) async fn append(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    Path(id): Path<String>,
    request: Request,
) -> Result<Json<Value>, ApiError> {
    let mut body = json_body(&app, request).await?;
    let appended = app.prepare(&caller, move |app, caller| {
        let id = app.sessions.id(&id)?;
        check(&mut body, &app.schemas.sessions.append, &app.bounds.model)?;
        let mut claim = app.sessions.claim(moment(app), &caller.name, id, false)?;
        let history = grown(app, &claim.history, read(&body)?)?;
        Ok(Json(change(app, &mut claim, history)?))
    });
    appended.await
}

pub(crate) async fn rollback(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    Path(id): Path<String>,
    request: Request,
) -> Result<Json<Value>, ApiError> {
    let mut body = json_body(&app, request).await?;
    let rolled = app.prepare(&caller, move |app, caller| {
        let id = app.sessions.id(&id)?;
        check(&mut body, &app.schemas.sessions.rollback, &app.bounds.model)?;
        let fields: RollbackFields = read(&body)?;
        let mut claim = app.sessions.claim(moment(app), &caller.name, id, false)?;
        let history = claim.history.cut(&**app, fields.to.into(), "to")?;
        Ok(Json(change(app, &mut claim, history)?))
    });
    rolled.await
}

pub(crate) async fn fork(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    Path(id): Path<String>,
    request: Request,
) -> Result<Json<Value>, ApiError> {
    let mut body = json_body(&app, request).await?;
    let forked = app.prepare(&caller, move |app, caller| {
        let id = app.sessions.id(&id)?;
        check(&mut body, &app.schemas.sessions.fork, &app.bounds.model)?;
        let fields: ForkFields = read(&body)?;
        let (_, mut history) = app.sessions.look(moment(app), &caller.name, id)?;
        match fields.at {
            Some(at) => history = history.cut(&**app, at.into(), "at")?,
            None => history.settle(&**app)?,
        }
        let n = fields.n.unwrap_or(1);
        let forks = app.sessions.fork(moment(app), &caller.name, id, &history, n, fields.name.as_deref())?;
        Ok(Json(json!({"object": "list", "sessions": forks.iter().map(show).collect::<Vec<_>>()})))
    });
    forked.await
}

pub(crate) async fn keep(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    Path(id): Path<String>,
    request: Request,
) -> Result<Json<Value>, ApiError> {
    let mut body = json_body(&app, request).await?;
    blocking(move || {
        let id = app.sessions.id(&id)?;
        check(&mut body, &app.schemas.sessions.keep, &app.bounds.model)?;
        let fields: KeepFields = read(&body)?;
        let also = fields.also.unwrap_or_default();
        // A 404 refers only to the session in the path.
        let sibling = |(i, id): (usize, &String)| {
            let unknown =
                || ApiError::invalid(format!("also[{i}]"), format!("`also[{i}]` is no session's id"));
            app.sessions.id(id).map_err(|_| unknown())
        };
        let also = also.iter().enumerate().map(sibling).collect::<Result<Vec<_>, _>>()?;
        let deleted = app.sessions.keep(moment(&app), &caller.name, id, &also)?;
        let deleted: Vec<String> = deleted.iter().map(|id| id.to_string()).collect();
        Ok(Json(json!({"id": id.to_string(), "object": "session.kept", "deleted": deleted})))
    })
    .await
}
