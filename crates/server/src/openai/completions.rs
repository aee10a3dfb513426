//! `POST /v1/completions`: continues a text.
use super::fields::{Common, CompletionFields, Prompt, check, check_together, read};
use super::generation::Answers;
use super::generation_request::{GenerationRequest, too_many};
use super::parts::{PART_BYTES, part_of};
use super::scores::Scorer;
use super::stream;
use super::token_ids::TokenIds;
use super::tokens::{decoding_bytes, encode_prompt, text_bytes};
use super::writer::{AnswerWriter, EchoedPrompt, finish_reason};
use crate::auth::Caller;
use crate::error::ApiError;
use crate::extract::Posted;
use crate::state::ServerState;
use axum::response::Response;
use kvist_engine::serving::{Done, LogProb, Token};
use kvist_model::tokenizer::TextState;
use serde_json::{Value, json};
use std::sync::Arc;

pub(crate) async fn completions(posted: Posted) -> Result<Response, ApiError> {
    let (state, caller) = (posted.call.state.clone(), posted.call.caller.clone());
    let prepared = posted.prepare(prepare);
    let Prepared { mut request, mut writer, common, echoed_bytes } = prepared.await?;
    if let Some(top) = request.logprobs.filter(|_| request.prompt_logprobs) {
        let tokens = request.prompts.iter().map(|prompt| prompt.len()).sum();
        request.memory_permit = Some(state.scores.take(&caller.name, tokens, top, request.deadline).await?);
    } else if let Some(bytes) = echoed_bytes {
        if bytes > PART_BYTES {
            request.memory_permit =
                Some(state.scores.take_echo(&caller.name, bytes, request.deadline).await?);
        }
        let prompts = request.prompts.clone();
        let echo = move |state: &Arc<ServerState>, prompt: &Arc<[u32]>| {
            let _reserved = state.work.take(decoding_bytes(state, prompt), "prompt")?;
            Ok(Echo::Text(state.decode(prompt)?.into()))
        };
        let echoes = state.prepare(&caller, move |state, _| prompts.iter().map(|p| echo(state, p)).collect());
        writer.echoes = echoes.await?;
    }
    let answers = Answers::begin(&state, request)?;
    stream::respond(answers, writer, &common).await
}

/// A request that is ready to submit.
struct Prepared {
    request: GenerationRequest,
    writer: CompletionWriter,
    common: Common,
    /// Size of the prompts' text in bytes, if the prompts are echoed without log-probabilities.
    echoed_bytes: Option<usize>,
}

/// Turn a body into a request to the engine. Runs on a blocking thread.
fn prepare(state: &Arc<ServerState>, caller: &Caller, body: &mut Value) -> Result<Prepared, ApiError> {
    let (mut request, common, echo) = admitted(state, caller, body)?;
    state.log_prompts(&request.id, &request.prompts);
    let scored = request.prompts.iter().filter(|_| request.prompt_logprobs);
    let writer = CompletionWriter {
        echoes: scored.map(Echo::scored).collect(),
        ..CompletionWriter::new(state, &request)
    };
    let echoed_bytes = (echo && !request.prompt_logprobs)
        .then(|| request.prompts.iter().map(|prompt| text_bytes(state, prompt)).sum());
    request.queue(state)?;
    Ok(Prepared { request, writer, common, echoed_bytes })
}

/// The prompts that this body would run.
pub(super) fn prompts(
    state: &Arc<ServerState>,
    caller: &Caller,
    body: &mut Value,
) -> Result<Vec<Arc<[u32]>>, ApiError> {
    admitted(state, caller, body).map(|(request, ..)| request.prompts)
}

/// A request that can be served, and whether it echoes its prompts.
fn admitted(
    state: &Arc<ServerState>,
    caller: &Caller,
    body: &mut Value,
) -> Result<(GenerationRequest, Common, bool), ApiError> {
    check_together(body, false)?;
    check_answers(state, body)?;
    check(body, &state.schemas.completions, &state.bounds.model)?;
    let (common, fields): (Common, CompletionFields) = (read(body)?, read(body)?);
    let echo = fields.echo.unwrap_or(false);
    let id = state.new_id("cmpl");
    let mut request = GenerationRequest::new(state, caller, &common, id, "completions")?;
    request.prompts = match fields.prompt {
        Prompt::Text(text) => vec![encode_prompt(state, &text, true, "prompt")?],
        Prompt::Texts(texts) => {
            texts.iter().map(|t| encode_prompt(state, t, true, "prompt")).collect::<Result<_, _>>()?
        }
        Prompt::Tokens(tokens) => vec![tokens],
        Prompt::Lists(lists) => lists,
    }
    .into_iter()
    .map(Arc::from)
    .collect();
    request.logprobs = fields.logprobs;
    request.prompt_logprobs = echo && fields.logprobs.is_some();
    request.admit(state, Some(fields.max_tokens.unwrap_or(16)), "prompt")?;
    Ok((request, common, echo))
}

/// Checks that the schema lacks, or for which it has a worse message.
fn check_answers(state: &ServerState, body: &Value) -> Result<(), ApiError> {
    // For too many prompts the schema would report the branch that matched deepest, which may be the wrong one.
    if let Some(prompts) = body["prompt"].as_array().filter(|prompts| prompts.iter().any(|p| !p.is_number()))
    {
        let n = body["n"].as_u64().and_then(|n| u32::try_from(n).ok()).unwrap_or(1).max(1);
        let max = state.bounds.max_choices;
        if prompts.len() as u64 * u64::from(n) > u64::from(max) {
            return Err(too_many(prompts.len(), n, max));
        }
    }
    if body["max_tokens"].as_f64() == Some(0.0) && body["echo"] != true {
        let message = "`max_tokens` is 0, so the response would be empty: set `echo: true`, or `max_tokens` to at \
                       least 1";
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
    fn add(&mut self, state: &ServerState, scores: impl Iterator<Item = Option<LogProb>>) {
        let Echo::Scored { prompt, text, made } = self else { return };
        let made = Arc::make_mut(made);
        let first = made.is_empty().then_some(None);
        let tokenizer = state.engine.model().tokenizer();
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
    fn tokens(&mut self, state: &ServerState) -> Arc<Vec<Token>> {
        let left = match self {
            Echo::Text(_) => return Arc::default(),
            Echo::Scored { prompt, made, .. } => prompt.len() - made.len(),
        };
        if left > 0 {
            self.add(state, (0..left).map(|_| None));
        }
        match self {
            Echo::Scored { made, .. } => made.clone(),
            Echo::Text(_) => Arc::default(),
        }
    }
}

/// Writes text completions.
pub(crate) struct CompletionWriter {
    state: Arc<ServerState>,
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
    ids: TokenIds,
}

impl CompletionWriter {
    pub fn new(state: &Arc<ServerState>, request: &GenerationRequest) -> Self {
        let total = request.prompts.len() * request.n as usize;
        CompletionWriter {
            state: state.clone(),
            id: request.id.clone(),
            created: state.now(),
            n: request.n as usize,
            echoes: Vec::new(),
            shown: vec![0; total],
            echoed: vec![0; total],
            scorer: request.logprobs.is_some().then(|| Scorer::text(state)),
            ids: TokenIds::new(request),
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
        self.echoes.get_mut(index / self.n).map_or_else(Arc::default, |echo| echo.tokens(&self.state))
    }
}

/// Tokens of a prompt per chunk of a stream.
const CHUNK_TOKENS: usize = 64;

impl AnswerWriter for CompletionWriter {
    fn head(&mut self, _streamed: bool) -> Value {
        json!({
            "id": self.id,
            "object": "text_completion",
            "created": self.created,
            "model": self.state.bounds.model,
        })
    }

    fn prompt(&mut self, index: usize, scores: Vec<LogProb>) {
        if let Some(echo) = self.echoes.get_mut(index / self.n) {
            echo.add(&self.state, scores.into_iter().map(Some));
        }
    }

    fn prompt_chunk(&mut self, index: usize, complete: bool) -> Option<Value> {
        let tokens = match self.echoes.get_mut(index / self.n)? {
            Echo::Text(text) => {
                let part = part_of(text, self.echoed[index], PART_BYTES).to_string();
                self.echoed[index] += part.len();
                return (!part.is_empty()).then(|| self.choice(index, part, Value::Null, None));
            }
            echo if complete => echo.tokens(&self.state),
            Echo::Scored { made, .. } => made.clone(),
        };
        let prompt_chunk =
            tokens.get(self.echoed[index]..).filter(|prompt_chunk| !prompt_chunk.is_empty())?;
        let prompt_chunk = &prompt_chunk[..prompt_chunk.len().min(CHUNK_TOKENS)];
        self.echoed[index] += prompt_chunk.len();
        Some(self.scored(index, prompt_chunk))
    }

    fn echoed_prompt(&mut self, index: usize) -> EchoedPrompt {
        match self.echoes.get(index / self.n) {
            None => EchoedPrompt::default(),
            Some(Echo::Text(text)) => EchoedPrompt { text: Some(text.clone()), ..EchoedPrompt::default() },
            Some(Echo::Scored { .. }) => EchoedPrompt { text: None, tokens: self.whole_prompt(index) },
        }
    }

    fn delta(&mut self, index: usize, token: &Token) -> Vec<Value> {
        if token.text.is_empty() && self.scorer.is_none() && !self.ids.are_wanted() {
            return Vec::new();
        }
        let mut choice = self.scored(index, std::slice::from_ref(token));
        self.ids.add(&mut choice, std::slice::from_ref(token));
        self.ids.add_prompt(&mut choice, index);
        vec![choice]
    }

    fn last(&mut self, index: usize, done: &Done) -> Vec<Value> {
        let mut choice =
            self.choice(index, done.text.clone(), Value::Null, Some(finish_reason(&done.finish)));
        self.ids.add_prompt(&mut choice, index);
        vec![choice]
    }

    fn whole(&mut self, index: usize, tokens: &[Token], done: &Done) -> Value {
        let mut text: String = tokens.iter().map(|t| t.text.as_str()).collect();
        text += &done.text;
        let mut choice = self.choice(index, text, Value::Null, Some(finish_reason(&done.finish)));
        self.ids.add(&mut choice, tokens);
        self.ids.add_prompt(&mut choice, index);
        choice
    }

    fn scorer(&self) -> Option<Scorer> {
        self.scorer.clone()
    }
}
