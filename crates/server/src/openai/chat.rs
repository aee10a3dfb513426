//! `POST /v1/chat/completions`: the assistant's turn.
//!
//! A model without a chat template gets a plain one: `role: text` and a line break for every message, then
//! `assistant:`. It ends where the next turn of the user would begin.
use super::generation::{Answers, Order};
use super::request::{ChatFields, Common, check, read};
use super::stream::{self, Shape, finish_reason};
use super::tokens::{encode, name_of, no_tokenizer};
use crate::app::App;
use crate::auth::Caller;
use crate::error::ApiError;
use crate::http::{blocking, json_body};
use crate::job::{Done, Token};
use axum::Extension;
use axum::extract::{Request, State};
use axum::response::{IntoResponse, Response};
use kvist_engine::model::Model;
use kvist_engine::template::Message;
use serde_json::{Value, json};
use std::sync::Arc;

/// Where the plain template's answer ends: the user's next turn.
const PLAIN_STOP: &str = "\nuser:";

pub(crate) async fn chat(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    request: Request,
) -> Result<Response, ApiError> {
    let body = json_body(&app, request).await?;
    let (order, shape, common) = blocking({
        let app = app.clone();
        move || prepare(&app, &caller, body)
    })
    .await?;
    let answers = Answers::begin(&app, order)?;
    if common.stream == Some(true) {
        let include_usage = common.stream_options.and_then(|o| o.include_usage).unwrap_or(false);
        return Ok(stream::stream(answers, shape, include_usage));
    }
    Ok(axum::Json(stream::whole(answers, shape).await?).into_response())
}

/// From a body to what is submitted.
fn prepare(app: &Arc<App>, caller: &Caller, mut body: Value) -> Result<(Order, Turn, Common), ApiError> {
    check(&mut body, &app.schemas.chat, &app.bounds.model)?;
    let (common, fields): (Common, ChatFields) = (read(&body)?, read(&body)?);
    let wants_scores = fields.logprobs.unwrap_or(false);
    if fields.top_logprobs.is_some() && !wants_scores {
        return Err(ApiError::invalid("top_logprobs", "`top_logprobs` needs `logprobs` to be true"));
    }
    let (asked, param) = match (fields.max_completion_tokens, fields.max_tokens) {
        (Some(new), Some(old)) if new != old => {
            let message =
                format!("`max_completion_tokens` is {new} and `max_tokens` {old}: give one of them");
            return Err(ApiError::invalid("max_completion_tokens", message));
        }
        (new, old) => (new.or(old), "messages"),
    };
    let id = app.new_id("chatcmpl");
    let mut order = Order::new(app, caller, &common, id.clone(), "chat")?;
    let model = app.engine.model();
    let messages: Vec<Message> = fields.messages.iter().map(message).collect();
    order.prompts = vec![prompt(model, &messages)?.into()];
    if model.chat_template().is_none() {
        order.stop.push(PLAIN_STOP.into());
    }
    order.logprobs = wants_scores.then(|| fields.top_logprobs.unwrap_or(0));
    order.admit(app, asked, param)?;
    app.log_prompts(&order.id, &order.prompts);
    let begun = vec![false; order.n as usize];
    let shape = Turn { app: app.clone(), id, created: app.now(), begun, logprobs: wants_scores };
    Ok((order, shape, common))
}

/// Of a message that passed the schema. What the API calls developer, templates call system.
fn message(message: &Value) -> Message {
    let role = match message["role"].as_str().unwrap_or_default() {
        "developer" => "system",
        role => role,
    };
    let content = match &message["content"] {
        Value::Array(parts) => {
            let texts: Vec<&str> = parts.iter().filter_map(|part| part["text"].as_str()).collect();
            texts.join("\n")
        }
        text => text.as_str().unwrap_or_default().to_string(),
    };
    Message::new(role, &content)
}

/// The conversation as tokens, up to where the answer begins.
fn prompt(model: &Model, messages: &[Message]) -> Result<Vec<u32>, ApiError> {
    match model.chat_template() {
        Some(template) => {
            let tokenizer = model.tokenizer().ok_or_else(no_tokenizer)?;
            let text = template.render(messages, tokenizer, true);
            // Templates refuse what their models were not trained on: roles that do not alternate, a system message.
            let text = text.map_err(|e| ApiError::invalid("messages", e.to_string()))?;
            encode(model, &text, false)
        }
        None => encode(model, &plain(messages), true),
    }
}

fn plain(messages: &[Message]) -> String {
    let mut text = String::new();
    for message in messages {
        text += &format!("{}: {}\n", message.role, message.content);
    }
    text + "assistant:"
}

/// How chat completions are written.
struct Turn {
    app: Arc<App>,
    id: String,
    created: u64,
    /// Answers whose role was said.
    begun: Vec<bool>,
    logprobs: bool,
}

impl Turn {
    fn choice(&self, index: usize, delta: Value, logprobs: Value, finish: Option<&str>) -> Value {
        json!({"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish})
    }

    /// The chunk that says who speaks, once.
    fn begin(&mut self, index: usize, choices: &mut Vec<Value>) {
        if !std::mem::replace(&mut self.begun[index], true) {
            let delta = json!({"role": "assistant", "content": ""});
            choices.push(self.choice(index, delta, Value::Null, None));
        }
    }

    fn scores(&self, tokens: &[Token]) -> Value {
        if !self.logprobs {
            return Value::Null;
        }
        let named = |id: u32, logprob: Option<f32>| {
            let name = name_of(&self.app, id);
            json!({"token": name, "logprob": logprob, "bytes": name.as_bytes()})
        };
        let one = |token: &Token| {
            let mut entry = named(token.id, token.logprob.as_ref().map(|l| l.logprob));
            let top = token.logprob.iter().flat_map(|l| &l.top);
            entry["top_logprobs"] = top.map(|(id, logprob)| named(*id, Some(*logprob))).collect();
            entry
        };
        json!({"content": tokens.iter().map(one).collect::<Vec<_>>(), "refusal": null})
    }
}

impl Shape for Turn {
    fn head(&self, streamed: bool) -> Value {
        json!({
            "id": self.id,
            "object": if streamed { "chat.completion.chunk" } else { "chat.completion" },
            "created": self.created,
            "model": self.app.bounds.model,
        })
    }

    fn delta(&mut self, index: usize, token: &Token) -> Vec<Value> {
        let mut choices = Vec::new();
        self.begin(index, &mut choices);
        if !token.text.is_empty() || self.logprobs {
            let scores = self.scores(std::slice::from_ref(token));
            choices.push(self.choice(index, json!({"content": token.text}), scores, None));
        }
        choices
    }

    fn last(&mut self, index: usize, done: &Done) -> Vec<Value> {
        let mut choices = Vec::new();
        self.begin(index, &mut choices);
        if !done.text.is_empty() {
            choices.push(self.choice(index, json!({"content": done.text}), Value::Null, None));
        }
        choices.push(self.choice(index, json!({}), Value::Null, Some(finish_reason(&done.finish))));
        choices
    }

    fn whole(&mut self, index: usize, tokens: &[Token], done: &Done) -> Value {
        let mut text: String = tokens.iter().map(|t| t.text.as_str()).collect();
        text += &done.text;
        self.app.log_answer(&self.id, index, &text);
        json!({
            "index": index,
            "message": {"role": "assistant", "content": text, "refusal": null},
            "logprobs": self.scores(tokens),
            "finish_reason": finish_reason(&done.finish),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_plain_template_is_the_documented_one() {
        let messages: Vec<Message> = [
            json!({"role": "developer", "content": "Be brief."}),
            json!({"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}),
            json!({"role": "assistant", "content": "c"}),
            json!({"role": "user", "content": "d"}),
        ]
        .iter()
        .map(message)
        .collect();
        assert_eq!(plain(&messages), "system: Be brief.\nuser: a\nb\nassistant: c\nuser: d\nassistant:");
    }
}
