//! `POST /v1/completions`: text goes on.
use super::generation::{Answers, Order};
use super::request::{Common, CompletionFields, Prompt, check, check_together, read};
use super::scores::Scorer;
use super::stream::{self, Shape, finish_reason};
use super::tokens::encode_prompt;
use crate::app::App;
use crate::auth::Caller;
use crate::error::ApiError;
use crate::http::{blocking, json_body};
use crate::job::{Done, Token};
use axum::Extension;
use axum::extract::{Request, State};
use axum::response::Response;
use serde_json::{Value, json};
use std::sync::Arc;

pub(crate) async fn completions(
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
    stream::respond(answers, shape, &common).await
}

/// From a body to what is submitted.
fn prepare(app: &Arc<App>, caller: &Caller, mut body: Value) -> Result<(Order, Text, Common), ApiError> {
    check_together(&body, false)?;
    check(&mut body, &app.schemas.completions, &app.bounds.model)?;
    let (common, fields): (Common, CompletionFields) = (read(&body)?, read(&body)?);
    let echo = fields.echo.unwrap_or(false);
    let id = app.new_id("cmpl");
    let mut order = Order::new(app, caller, &common, id, "completions")?;
    order.prompts = match fields.prompt {
        Prompt::Text(text) => vec![encode_prompt(app, &text, true, "prompt")?],
        Prompt::Texts(texts) => {
            texts.iter().map(|t| encode_prompt(app, t, true, "prompt")).collect::<Result<_, _>>()?
        }
        Prompt::Tokens(tokens) => vec![tokens],
        Prompt::Lists(lists) => lists,
    }
    .into_iter()
    .map(Arc::from)
    .collect();
    order.logprobs = fields.logprobs;
    order.admit(app, Some(fields.max_tokens.unwrap_or(16)), "prompt")?;
    app.log_prompts(&order.id, &order.prompts);
    let echoes = match echo {
        true => order.prompts.iter().map(|p| app.decode(p)).collect::<Result<_, _>>()?,
        false => Vec::new(),
    };
    let shape = Text::new(app, &order, echoes);
    Ok((order, shape, common))
}

/// How text completions are written.
pub(crate) struct Text {
    app: Arc<App>,
    id: String,
    created: u64,
    n: usize,
    /// The prompts, if they are to be given back.
    echoes: Vec<String>,
    /// Characters of each answer that were given out: where the next token's text begins.
    shown: Vec<usize>,
    scorer: Option<Scorer>,
}

impl Text {
    pub fn new(app: &Arc<App>, order: &Order, echoes: Vec<String>) -> Self {
        Text {
            app: app.clone(),
            id: order.id.clone(),
            created: app.now(),
            n: order.n as usize,
            echoes,
            shown: vec![0; order.prompts.len() * order.n as usize],
            scorer: order.logprobs.is_some().then(|| Scorer::text(app)),
        }
    }

    fn choice(&self, index: usize, text: String, logprobs: Value, finish: Option<&str>) -> Value {
        json!({"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish})
    }

    /// The prompt, once, before the answer's first text.
    fn echo(&self, index: usize) -> &str {
        self.echoes.get(index / self.n).map_or("", String::as_str)
    }
}

impl Shape for Text {
    fn head(&self, _streamed: bool) -> Value {
        json!({
            "id": self.id,
            "object": "text_completion",
            "created": self.created,
            "model": self.app.bounds.model,
        })
    }

    fn delta(&mut self, index: usize, token: &Token) -> Vec<Value> {
        let first = self.shown[index] == 0;
        let echo = if first { self.echo(index) } else { "" };
        if token.text.is_empty() && echo.is_empty() && self.scorer.is_none() {
            return Vec::new();
        }
        let text = format!("{echo}{}", token.text);
        let offset = self.shown[index];
        let scores = self.scorer.as_ref().map_or(Value::Null, |scorer| scorer.of_token(token, offset));
        self.shown[index] += text.chars().count();
        vec![self.choice(index, text, scores, None)]
    }

    fn last(&mut self, index: usize, done: &Done) -> Vec<Value> {
        let echo = if self.shown[index] == 0 { self.echo(index) } else { "" };
        let text = format!("{echo}{}", done.text);
        vec![self.choice(index, text, Value::Null, Some(finish_reason(&done.finish)))]
    }

    fn whole(&mut self, index: usize, tokens: &[Token], done: &Done) -> Value {
        let mut text = self.echo(index).to_string();
        tokens.iter().for_each(|t| text += &t.text);
        text += &done.text;
        self.choice(index, text, Value::Null, Some(finish_reason(&done.finish)))
    }

    fn scorer(&self) -> Option<Scorer> {
        self.scorer.clone()
    }
}
