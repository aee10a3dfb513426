//! `POST /v1/completions`: continues a text.
use super::fields::{Common, CompletionFields, Prompt, check, check_together, read};
use super::generation::{Answers, Order, too_many};
use super::scores::Scorer;
use super::stream::{self, Before, Shape, finish_reason};
use super::tokens::{PART_BYTES, decoding_bytes, encode_prompt, part_of, text_bytes};
use crate::app::App;
use crate::auth::Caller;
use crate::error::ApiError;
use crate::http::json_body;
use crate::job::{Done, LogProb, Token};
use axum::Extension;
use axum::extract::{Request, State};
use axum::response::Response;
use kvist_model::tokenizer::TextState;
use serde_json::{Value, json};
use std::sync::Arc;

pub(crate) async fn completions(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    request: Request,
) -> Result<Response, ApiError> {
    let mut body = json_body(&app, request).await?;
    let prepared = app.prepare(&caller, move |app, caller| prepare(app, caller, &mut body));
    let Prepared { mut order, mut shape, common, echoed_bytes } = prepared.await?;
    if let Some(top) = order.logprobs.filter(|_| order.prompt_logprobs) {
        let tokens = order.prompts.iter().map(|prompt| prompt.len()).sum();
        order.leave = Some(app.scores.take(&caller.name, tokens, top, order.deadline).await?);
    } else if let Some(bytes) = echoed_bytes {
        if bytes > PART_BYTES {
            order.leave = Some(app.scores.take_echo(&caller.name, bytes, order.deadline).await?);
        }
        let prompts = order.prompts.clone();
        let echo = move |app: &Arc<App>, prompt: &Arc<[u32]>| {
            let _taken = app.work.take(decoding_bytes(app, prompt), "prompt")?;
            Ok(Echo::Text(app.decode(prompt)?.into()))
        };
        let echoes = app.prepare(&caller, move |app, _| prompts.iter().map(|p| echo(app, p)).collect());
        shape.echoes = echoes.await?;
    }
    let answers = Answers::begin(&app, order)?;
    stream::respond(answers, shape, &common).await
}

/// A request that is ready to submit.
struct Prepared {
    order: Order,
    shape: Text,
    common: Common,
    /// Size of the prompts' text in bytes, if the prompts are echoed without log-probabilities.
    echoed_bytes: Option<usize>,
}

/// Turn a body into a request to the engine. Runs on a blocking thread.
fn prepare(app: &Arc<App>, caller: &Caller, body: &mut Value) -> Result<Prepared, ApiError> {
    check_together(body, false)?;
    check_answers(app, body)?;
    check(body, &app.schemas.completions, &app.bounds.model)?;
    let (common, fields): (Common, CompletionFields) = (read(body)?, read(body)?);
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
    order.prompt_logprobs = echo && fields.logprobs.is_some();
    order.admit(app, Some(fields.max_tokens.unwrap_or(16)), "prompt")?;
    app.log_prompts(&order.id, &order.prompts);
    let scored = order.prompts.iter().filter(|_| order.prompt_logprobs);
    let shape = Text { echoes: scored.map(Echo::scored).collect(), ..Text::new(app, &order) };
    let echoed_bytes = (echo && !order.prompt_logprobs)
        .then(|| order.prompts.iter().map(|prompt| text_bytes(app, prompt)).sum());
    order.queue(app)?;
    Ok(Prepared { order, shape, common, echoed_bytes })
}

/// Checks that the schema lacks, or for which it has a worse message.
fn check_answers(app: &App, body: &Value) -> Result<(), ApiError> {
    // For too many prompts the schema would report the branch that matched deepest, which may be the wrong one.
    if let Some(prompts) = body["prompt"].as_array().filter(|prompts| prompts.iter().any(|p| !p.is_number()))
    {
        let n = body["n"].as_u64().and_then(|n| u32::try_from(n).ok()).unwrap_or(1).max(1);
        let most = app.bounds.max_choices;
        if prompts.len() as u64 * u64::from(n) > u64::from(most) {
            return Err(too_many(prompts.len(), n, most));
        }
    }
    if body["max_tokens"].as_f64() == Some(0.0) && body["echo"] != true {
        let message = "`max_tokens` is 0, so that nothing is said: it needs `echo: true`, or at least 1";
        return Err(ApiError::invalid("max_tokens", message));
    }
    Ok(())
}

/// A prompt that is echoed.
enum Echo {
    /// As text, which all answers to the prompt share.
    Text(Arc<str>),
    /// As tokens with log-probabilities.
    Scored { prompt: Arc<[u32]>, text: TextState, made: Arc<Vec<Token>> },
}

impl Echo {
    fn scored(prompt: &Arc<[u32]>) -> Self {
        Echo::Scored { prompt: prompt.clone(), text: TextState::new(&[]), made: Arc::default() }
    }

    /// Add the scores of the next tokens. The first token of a prompt has none.
    fn add(&mut self, app: &App, scores: impl Iterator<Item = Option<LogProb>>) {
        let Echo::Scored { prompt, text, made } = self else { return };
        let made = Arc::make_mut(made);
        let first = made.is_empty().then_some(None);
        let tokenizer = app.engine.model().tokenizer();
        for logprob in first.into_iter().chain(scores) {
            let Some(&id) = prompt.get(made.len()) else { return };
            let mut piece = tokenizer.and_then(|t| text.push(t, id).ok()).unwrap_or_default();
            if made.len() + 1 == prompt.len() {
                piece += &tokenizer.and_then(|t| text.finish(t).ok()).unwrap_or_default();
            }
            made.push(Token { id, text: piece, logprob });
        }
    }

    /// All tokens of the prompt, scored or not.
    fn tokens(&mut self, app: &App) -> Arc<Vec<Token>> {
        let left = match self {
            Echo::Text(_) => return Arc::default(),
            Echo::Scored { prompt, made, .. } => prompt.len() - made.len(),
        };
        if left > 0 {
            self.add(app, (0..left).map(|_| None));
        }
        match self {
            Echo::Scored { made, .. } => made.clone(),
            Echo::Text(_) => Arc::default(),
        }
    }
}

/// Writes text completions.
pub(crate) struct Text {
    app: Arc<App>,
    id: String,
    created: u64,
    n: usize,
    /// The prompts, if they are echoed.
    echoes: Vec<Echo>,
    /// Characters of each answer that were written: the offset of the next token's text.
    shown: Vec<usize>,
    /// How much of the prompt was written for each answer: in scored tokens, or in bytes of the text.
    echoed: Vec<usize>,
    scorer: Option<Scorer>,
}

impl Text {
    pub fn new(app: &Arc<App>, order: &Order) -> Self {
        let total = order.prompts.len() * order.n as usize;
        Text {
            app: app.clone(),
            id: order.id.clone(),
            created: app.now(),
            n: order.n as usize,
            echoes: Vec::new(),
            shown: vec![0; total],
            echoed: vec![0; total],
            scorer: order.logprobs.is_some().then(|| Scorer::text(app)),
        }
    }

    fn choice(&self, index: usize, text: String, logprobs: Value, finish: Option<&str>) -> Value {
        json!({"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish})
    }

    /// A choice with tokens and their scores.
    fn scored(&mut self, index: usize, tokens: &[Token]) -> Value {
        let text: String = tokens.iter().map(|t| t.text.as_str()).collect();
        let offset = self.shown[index];
        let scores = self.scorer.as_ref().map_or(Value::Null, |scorer| scorer.of_tokens(tokens, offset));
        self.shown[index] += text.chars().count();
        self.choice(index, text, scores, None)
    }

    fn whole_prompt(&mut self, index: usize) -> Arc<Vec<Token>> {
        self.echoes.get_mut(index / self.n).map_or_else(Arc::default, |echo| echo.tokens(&self.app))
    }
}

/// Tokens of a prompt per chunk of a stream.
const CHUNK_TOKENS: usize = 64;

impl Shape for Text {
    fn head(&self, _streamed: bool) -> Value {
        json!({
            "id": self.id,
            "object": "text_completion",
            "created": self.created,
            "model": self.app.bounds.model,
        })
    }

    fn prompt(&mut self, index: usize, scores: Vec<LogProb>) {
        if let Some(echo) = self.echoes.get_mut(index / self.n) {
            echo.add(&self.app, scores.into_iter().map(Some));
        }
    }

    fn unsaid(&mut self, index: usize, complete: bool) -> Option<Value> {
        let tokens = match self.echoes.get_mut(index / self.n)? {
            Echo::Text(text) => {
                let part = part_of(text, self.echoed[index], PART_BYTES).to_string();
                self.echoed[index] += part.len();
                return (!part.is_empty()).then(|| self.choice(index, part, Value::Null, None));
            }
            echo if complete => echo.tokens(&self.app),
            Echo::Scored { made, .. } => made.clone(),
        };
        let unsaid = tokens.get(self.echoed[index]..).filter(|unsaid| !unsaid.is_empty())?;
        let unsaid = &unsaid[..unsaid.len().min(CHUNK_TOKENS)];
        self.echoed[index] += unsaid.len();
        Some(self.scored(index, unsaid))
    }

    fn before(&mut self, index: usize) -> Before {
        match self.echoes.get(index / self.n) {
            None => Before::default(),
            Some(Echo::Text(text)) => Before { text: Some(text.clone()), ..Before::default() },
            Some(Echo::Scored { .. }) => Before { text: None, tokens: self.whole_prompt(index) },
        }
    }

    fn delta(&mut self, index: usize, token: &Token) -> Vec<Value> {
        match token.text.is_empty() && self.scorer.is_none() {
            true => Vec::new(),
            false => vec![self.scored(index, std::slice::from_ref(token))],
        }
    }

    fn last(&mut self, index: usize, done: &Done) -> Vec<Value> {
        vec![self.choice(index, done.text.clone(), Value::Null, Some(finish_reason(&done.finish)))]
    }

    fn whole(&mut self, index: usize, tokens: &[Token], done: &Done) -> Value {
        let mut text: String = tokens.iter().map(|t| t.text.as_str()).collect();
        text += &done.text;
        self.choice(index, text, Value::Null, Some(finish_reason(&done.finish)))
    }

    fn scorer(&self) -> Option<Scorer> {
        self.scorer.clone()
    }
}
