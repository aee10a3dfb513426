//! Structured output: `response_format`, and tool calls that a request requires.
//!
//! A [`Grammar`] describes what is required. A [`GrammarCompiler`] knows the bytes of a model's tokens (there is one
//! per model, it is large). Together they yield a [`Constraint`], which masks the vocabulary before each token.
//! llguidance does the work. An answer that ended by itself is valid; one that reached its token limit is the beginning
//! of a valid one.
//!
//! Schemas come from untrusted clients. They are checked before llguidance sees them ([`Schema`] says what is refused).
//! Their size is bounded, and llguidance's own limits bound the rest. A hostile schema gets an error, either when it is
//! compiled or at the token where it grows too large. It costs the compiling of 64 KiB at most, some
//! milliseconds per token and some tens of MB. Compile on a thread that may block.
mod disjoint;
mod exact;
mod schema;

pub use schema::Schema;
use schema::{MAX_SCHEMA_BYTES, PROOF_STEPS};

use crate::Error;
use crate::serving::Constraint;
use kvist_model::Model;
use kvist_model::tokenizer::Tokenizer;
use llguidance::api::{ParserLimits, StopReason, TopLevelGrammar};
use llguidance::toktrie::{ApproximateTokEnv, InferenceCapabilities, TokRxInfo, TokTrie};
use llguidance::{Matcher, ParserFactory};
use serde_json::Value;
use std::collections::BTreeMap;
use std::sync::Arc;

/// What is wrong with a request, and in which parameter: `param` and `message` of OpenAI's errors.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("`{param}` {problem}")]
pub struct InvalidParameter {
    /// A path, such as `response_format.json_schema.schema.properties.a`.
    pub param: String,
    pub problem: String,
    /// The check was aborted because the client disconnected or the time was over. The parameter may be valid.
    pub halted: bool,
}

impl InvalidParameter {
    pub fn new(param: &str, problem: String) -> Self {
        InvalidParameter { param: param.into(), problem, halted: false }
    }

    pub(crate) fn halted(param: &str) -> Self {
        let problem = "could not be checked in time".into();
        InvalidParameter { halted: true, ..Self::new(param, problem) }
    }
}

/// `response_format` of a request.
#[derive(Clone, Debug, PartialEq)]
pub enum ResponseFormat {
    Text,
    /// Any JSON object.
    JsonObject,
    /// A value that matches this schema.
    JsonSchema {
        schema: Schema,
    },
}

impl ResponseFormat {
    pub fn from_json(format: &Value) -> Result<Self, InvalidParameter> {
        let bad = |field: &str, problem: &str| {
            InvalidParameter::new(&format!("response_format{field}"), problem.into())
        };
        match format.get("type").and_then(Value::as_str) {
            Some("text") => Ok(ResponseFormat::Text),
            Some("json_object") => Ok(ResponseFormat::JsonObject),
            Some("json_schema") => {
                let given = format.get("json_schema").and_then(Value::as_object);
                let given = given.ok_or_else(|| bad(".json_schema", "is not an object"))?;
                let allowed = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-');
                match given.get("name").and_then(Value::as_str) {
                    Some(name) if (1..=64).contains(&name.len()) && name.chars().all(allowed) => {}
                    _ => {
                        let what = "must be a string of 1 to 64 letters, digits, underscores or dashes";
                        return Err(bad(".json_schema.name", what));
                    }
                }
                // Schema features that cannot be enforced are refused with either value of `strict`.
                if !matches!(given.get("strict"), None | Some(Value::Null | Value::Bool(_))) {
                    return Err(bad(".json_schema.strict", "must be true or false"));
                }
                let place = "response_format.json_schema.schema";
                let schema = given.get("schema").ok_or_else(|| bad(".json_schema.schema", "is missing"))?;
                let schema = Schema::new(place, schema.clone());
                Ok(ResponseFormat::JsonSchema { schema })
            }
            Some(other) => {
                let what = format!("is `{other}`; expected text, json_object or json_schema");
                Err(bad(".type", &what))
            }
            None => Err(bad(".type", "is missing; expected text, json_object or json_schema")),
        }
    }

    /// The schema of the answer; `None` for text.
    pub fn schema(&self) -> Option<Schema> {
        match self {
            ResponseFormat::Text => None,
            ResponseFormat::JsonObject => {
                Some(Schema::new("response_format", serde_json::json!({"type": "object"})))
            }
            ResponseFormat::JsonSchema { schema } => Some(schema.clone()),
        }
    }

    /// `None` for text.
    pub fn grammar(&self) -> Option<Grammar> {
        Some(Grammar::new("start: answer\n".into()).with("answer", self.schema()?))
    }
}

/// The required form of an answer: rules in Lark's syntax, JSON schemas as further rules, and marks (control tokens or
/// literal texts).
#[derive(Clone, Debug, PartialEq)]
pub struct Grammar {
    lark: String,
    schemas: Vec<(String, Schema)>,
    marks: Vec<(&'static str, &'static str)>,
    /// Remaining steps for proofs about its schemas.
    pub(crate) proof_steps: usize,
}

impl Grammar {
    pub(crate) fn new(lark: String) -> Self {
        Grammar { lark, schemas: Vec::new(), marks: Vec::new(), proof_steps: PROOF_STEPS }
    }
    /// Add a rule, which must end with a newline.
    pub(crate) fn rule(&mut self, rule: &str) {
        self.lark += rule;
    }
    /// Define the rule of this name as a value that matches the schema.
    pub(crate) fn with(mut self, rule: &str, schema: Schema) -> Self {
        self.schemas.push((rule.into(), schema));
        self
    }
    /// Define the rule of this name as the control token that is called `text`, or as that text if there is none.
    pub(crate) fn mark(mut self, rule: &'static str, text: &'static str) -> Self {
        self.marks.push((rule, text));
        self
    }
}

/// Largest total size of all schemas of one grammar, in bytes. A request may bring a hundred tools.
const MAX_GRAMMAR_BYTES: usize = 4 * MAX_SCHEMA_BYTES;

/// llguidance recurses along references, with some KiB of stack per step. Only pages that are touched take memory.
const COMPILER_STACK_BYTES: usize = 256 << 20;

/// Compiles grammars into masks over one model's tokens.
pub struct GrammarCompiler {
    factory: ParserFactory,
    /// Control tokens by name.
    control: BTreeMap<String, u32>,
    /// The model has an end-of-text token.
    has_end: bool,
}

impl std::fmt::Debug for GrammarCompiler {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("GrammarCompiler").finish_non_exhaustive()
    }
}

impl GrammarCompiler {
    /// Takes some tenths of a second for a large vocabulary.
    pub fn of_model(model: &Model) -> Result<Self, Error> {
        let tokenizer = model
            .tokenizer()
            .ok_or_else(|| Error::Usage("this model has no tokenizer, and a grammar needs one".into()))?;
        Self::new(tokenizer, model.config().vocab, model.end_tokens())
    }

    /// For a model with `vocab` logits. A text may end with any of `end_tokens`, exactly when its grammar is complete.
    pub fn new(tokenizer: &Tokenizer, vocab: usize, end_tokens: &[u32]) -> Result<Self, Error> {
        let pieces = tokenizer.pieces(vocab)?;
        let mut control = BTreeMap::new();
        let mut words = Vec::with_capacity(vocab + 1);
        for (piece, id) in pieces.into_iter().zip(0..) {
            // An end token has no text, even if the tokenizer file does not mark it as a control token.
            if piece.control || end_tokens.contains(&id) {
                let mut word = vec![TokTrie::SPECIAL_TOKEN_MARKER];
                word.extend(&piece.bytes);
                words.push(word);
                control.insert(String::from_utf8_lossy(&piece.bytes).into_owned(), id);
            } else {
                words.push(piece.bytes);
            }
        }
        let mut ends: Vec<u32> = end_tokens.iter().copied().filter(|id| (*id as usize) < vocab).collect();
        let has_end = !ends.is_empty();
        if !has_end {
            // llguidance requires one. This id lies beyond the logits, so it is never sampled.
            ends.push(words.len() as u32);
            words.push(b"\xff<end>".to_vec());
        }
        let broke =
            |what: String| Error::Usage(format!("cannot build a grammar for this vocabulary: {what}"));
        // llguidance asserts on words longer than its trie nodes can count.
        if let Some(long) = words.iter().find(|word| word.len() > 1000) {
            return Err(broke(format!("a token has {} bytes", long.len())));
        }
        let info = TokRxInfo::new(words.len() as u32, ends[0]);
        let trie = TokTrie::from(&info, &words).with_eos_tokens(&ends);
        let env: llguidance::toktrie::TokEnv = Arc::new(ApproximateTokEnv::new(trie));
        let slices = llguidance::earley::SlicedBiasComputer::general_slices();
        let factory = ParserFactory::new(&env, InferenceCapabilities::default(), &slices);
        let mut factory = factory.map_err(|e| broke(e.to_string()))?;
        factory.quiet();
        *factory.limits_mut() = ParserLimits {
            // About 1 to 2 kB each.
            max_lexer_states: 30_000,
            max_grammar_size: 200_000,
            precompute_large_lexemes: false,
            verbose_errors: false,
            ..ParserLimits::default()
        };
        Ok(GrammarCompiler { factory, control, has_end })
    }

    /// Compile `grammar`. Errors name the parameter of the request.
    pub fn compile(&self, grammar: &Grammar) -> Result<Compiled, InvalidParameter> {
        let mut lark = grammar.lark.clone();
        for (rule, text) in &grammar.marks {
            let literal = Value::from(*text).to_string();
            let mark = self.control.get(*text).map_or(literal, |id| format!("<[{id}]>"));
            lark += &format!("{rule}: {mark}\n");
        }
        let (mut bytes, mut texts) = (0, Vec::with_capacity(grammar.schemas.len()));
        let mut proof_steps = grammar.proof_steps;
        for (rule, schema) in &grammar.schemas {
            let text = schema.checked(&mut proof_steps)?;
            bytes += text.len();
            if bytes > MAX_GRAMMAR_BYTES {
                let what =
                    format!("brings the schemas to {bytes} bytes; at most {MAX_GRAMMAR_BYTES} are allowed");
                return Err(InvalidParameter::new(schema.place(), what));
            }
            lark += &format!("{rule}: %json {text}\n");
            texts.push((schema.place(), text));
        }
        let error = match self.matcher(lark) {
            Ok(matcher) => return Ok(Compiled { matcher, has_end: self.has_end }),
            Err(error) => error,
        };
        // If there are several schemas, report the one that fails alone.
        let alone = |(place, text): &(&str, String)| {
            Some((place.to_string(), self.matcher(format!("start: %json {text}\n")).err()?))
        };
        let blamed = match texts.as_slice() {
            [(place, _)] => Some((place.to_string(), error.clone())),
            several => several.iter().find_map(alone),
        };
        let (place, error) = blamed.unwrap_or_else(|| ("tools".into(), error));
        Err(InvalidParameter::new(&place, format!("cannot be compiled to a grammar: {}", plain(&error))))
    }

    fn matcher(&self, lark: String) -> Result<Matcher, String> {
        let compile = || {
            let parser = self.factory.create_parser(TopLevelGrammar::from_lark(lark));
            let matcher = parser.map(|parser| Matcher::new(Ok(parser))).map_err(|e| e.to_string())?;
            // Compute the first mask now, so that errors in the request are reported before it waits in the queue.
            matcher.deep_clone().compute_mask().map_err(|e| e.to_string())?;
            Ok(matcher)
        };
        std::thread::scope(|scope| {
            let thread = std::thread::Builder::new().stack_size(COMPILER_STACK_BYTES);
            let thread = thread.spawn_scoped(scope, compile);
            thread.map_err(|e| e.to_string())?.join().unwrap_or_else(|_| Err("the compiler panicked".into()))
        })
    }
}

/// llguidance's message, without the grammar, the state and the backtrace that it appends.
fn plain(error: &str) -> String {
    let marks = ["\n<state>", "\n<non-verbose", "\n<backtrace>", "\n   1 | "];
    let end = marks.iter().filter_map(|mark| error.find(mark)).min().unwrap_or(error.len());
    let error = error[..end].trim();
    let error = error.split_once("failed to compile JSON schema: ").map_or(error, |(_, error)| error);
    if error == StopReason::NoExtensionBias.to_string() {
        return NO_TOKEN.into();
    }
    error.replace("panic: ", "llguidance panicked: ")
}

/// A compiled grammar in its start state.
pub struct Compiled {
    matcher: Matcher,
    has_end: bool,
}

impl std::fmt::Debug for Compiled {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Compiled").finish_non_exhaustive()
    }
}

impl Compiled {
    /// A constraint for one choice of a request. Constraints share no state, so no thread waits for another.
    pub fn constraint(&self) -> Box<dyn Constraint> {
        Box::new(Follow { matcher: self.matcher.deep_clone(), has_end: self.has_end })
    }
}

/// The grammar state of one answer.
struct Follow {
    matcher: Matcher,
    has_end: bool,
}

impl Constraint for Follow {
    fn mask(&mut self, logits: &mut [f32]) -> Result<(), String> {
        let mask = self.matcher.compute_mask_or_eos().map_err(|e| failed(&e.to_string()))?;
        let mut left = 0;
        for (token, logit) in logits.iter_mut().enumerate() {
            if token < mask.len() && mask.is_allowed(token as u32) {
                left += 1;
            } else {
                *logit = f32::NEG_INFINITY;
            }
        }
        if left == 0 {
            return Err(failed(NO_TOKEN));
        }
        Ok(())
    }

    fn accept(&mut self, token: u32) -> Result<bool, String> {
        self.matcher.consume_token(token).map_err(|e| failed(&e.to_string()))?;
        if self.matcher.is_stopped() || self.has_end {
            return Ok(self.matcher.is_stopped());
        }
        self.matcher.is_accepting().map_err(|e| failed(&e.to_string()))
    }
}

/// If the vocabulary lacks some bytes, no token may fit although the grammar is not complete.
const NO_TOKEN: &str = "no token of the model can continue here";

fn failed(error: &str) -> String {
    format!("the grammar of the answer failed: {}", plain(error))
}
