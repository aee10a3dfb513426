//! Sessions: a text and its cache. The branches of a session share its memory.
mod branch;

use crate::arguments::{Options, Prompt, Wanted, from_json};
use crate::errors::{Class, argument, engine, file, mismatch, refused};
use crate::generation::Generation;
use crate::model::Model;
use crate::wait::{exclusive, without_gil};
pub use branch::{Branch, Core, Pool};
use kvist_cache::{NodeId, SeqId};
use kvist_device::Registry;
use kvist_engine::Error;
use kvist_engine::frozen::{self, SharedPrefix};
use kvist_engine::generate::Stepwise;
use kvist_engine::memory::CacheConfig;
use kvist_engine::saved::{self, LateOrigin, SavedSession, SavedText};
use kvist_engine::session::{LogitRows, ModelSession, SequenceInput};
use kvist_engine::speculate::Speculator;
use kvist_model::answers::AnswerSplitter;
use numpy::{IntoPyArray, PyArray2, PyArrayMethods};
use pyo3::prelude::*;
use pyo3::types::PyDict;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};

/// A text and its cache. `Model.session` makes one.
#[pyclass(frozen, module = "kvist")]
pub struct Session {
    model: Arc<kvist_model::Model>,
    origin: Arc<LateOrigin>,
    branch: Arc<Mutex<Branch>>,
}

const SESSION: &str = "session";

const NO_TREES: &str =
    "draft trees do not outlive their pass in this kind of cache: use a session with kind=\"tree\"";

impl Session {
    pub fn open(
        py: Python<'_>,
        (model, origin): (&Arc<kvist_model::Model>, &Arc<LateOrigin>),
        registry: &Registry,
        config: &CacheConfig,
        speculator: Option<Speculator>,
    ) -> PyResult<Self> {
        let session = py.detach(|| ModelSession::new(model, registry, config)).map_err(engine)?;
        let pool = Arc::new(Pool::new(Core { session, speculator, next_seq: 1, fed: SeqId::ONLY }));
        let branch =
            Branch { pool, seq: SeqId::ONLY, tokens: Vec::new(), answer: 0, nodes: Vec::new(), version: 0 };
        Ok(Session { model: model.clone(), origin: origin.clone(), branch: Arc::new(Mutex::new(branch)) })
    }

    /// Begins this new session with a file's text. The model was compared.
    pub fn begin_with(&self, py: Python<'_>, beginning: &Beginning) -> PyResult<()> {
        without_gil(py, || {
            let mut branch = exclusive(SESSION, &self.branch)?;
            let pool = branch.pool.clone();
            let (mut core, seq) = (pool.lock(), branch.seq);
            let origin = self.origin.of(&self.model, core.session.config()).map_err(engine)?;
            beginning.check(&origin)?;
            match beginning {
                Beginning::Saved(saved) => {
                    saved::resume(&mut core.session, seq, saved, &origin, usize::MAX).map_err(file)?;
                }
                Beginning::Prefix(prefix) => {
                    frozen::begin_with(&mut core.session, seq, prefix, &origin, usize::MAX).map_err(file)?;
                }
            }
            branch.tokens = beginning.tokens().to_vec();
            branch.answer = branch.tokens.len();
            Ok(())
        })
    }

    /// Begins a generation: of an answer, whose reasoning is apart, if `answers`; else of plain text.
    pub fn begin(&self, py: Python<'_>, text: Text, wanted: &Wanted, answers: bool) -> PyResult<Generation> {
        let mut sampler = wanted.sampler()?;
        let (stepwise, version, splitter) = without_gil(py, || {
            let mut branch = exclusive(SESSION, &self.branch)?;
            let pool = branch.pool.clone();
            let mut core = pool.lock();
            let text = text.after(&branch)?;
            kvist_engine::check_prompt(core.session.config(), text.len()).map_err(engine)?;
            branch.set(&mut core, text).map_err(engine)?;
            let held = branch.held(&mut core);
            let (before, prompt) = branch.tokens.split_at(held);
            sampler.observe(before);
            let splitter = answers.then(|| AnswerSplitter::new(&self.model, &branch.tokens)).flatten();
            let (splitter, marks) = splitter.unzip();
            let session = &mut core.session;
            let made = Stepwise::after(
                session,
                branch.seq,
                before,
                prompt.to_vec(),
                sampler,
                &wanted.limits,
                marks.unwrap_or_default(),
            );
            Ok((made.map_err(engine)?, branch.version, splitter))
        })?;
        Ok(Generation::new(self.branch.clone(), stepwise, version, splitter))
    }

    /// Adds tokens to the text. Returns rows of logits.
    fn forward_text(&self, py: Python<'_>, tokens: Prompt, all: bool) -> PyResult<Vec<f32>> {
        let text = self.more(tokens)?;
        without_gil(py, || {
            let mut branch = exclusive(SESSION, &self.branch)?;
            let known = branch.tokens.len();
            let text = text.after(&branch)?;
            let pool = branch.pool.clone();
            let mut core = pool.lock();
            if text.len() == known {
                return Err(engine(Error::EmptyPrompt));
            }
            kvist_engine::check_prompt(core.session.config(), text.len()).map_err(engine)?;
            branch.set(&mut core, text).map_err(engine)?;
            core.extends(branch.seq);
            let held = branch.held(&mut core);
            let done =
                compute(&mut core, branch.seq, &branch.tokens[held..], all.then_some(known.max(held) - held));
            if let Err(error) = done {
                let before = branch.tokens[..known].to_vec();
                branch.set(&mut core, before).map_err(engine)?;
                return Err(engine(error));
            }
            Ok(core.session.take_logits())
        })
    }

    /// Adds draft nodes behind the text, whose missing tokens are computed first. Returns rows of logits.
    fn forward_tree(
        &self,
        py: Python<'_>,
        tokens: Prompt,
        parents: &[Option<u32>],
        all: bool,
    ) -> PyResult<Vec<f32>> {
        let tokens = tokens.encode(&self.model, false)?;
        if tokens.len() != parents.len() {
            return Err(argument(format!(
                "`parents`: {} for {} tokens: give one for each, None for a child of the text's end",
                parents.len(),
                tokens.len()
            )));
        }
        let parents: Vec<Option<NodeId>> = parents.iter().map(|parent| parent.map(NodeId)).collect();
        without_gil(py, || {
            let mut branch = exclusive(SESSION, &self.branch)?;
            let pool = branch.pool.clone();
            let mut core = pool.lock();
            if core.session.cache().trees().is_none() {
                return Err(argument(NO_TREES));
            }
            if tokens.is_empty() {
                return Err(engine(Error::EmptyPrompt));
            }
            core.extends(branch.seq);
            let (seq, held) = (branch.seq, branch.held(&mut core));
            let missing = &branch.tokens[held..];
            if !missing.is_empty() {
                core.session.prefill(seq, missing, &mut |_| true).map_err(engine)?;
            }
            let rows = if all { LogitRows::All } else { LogitRows::LastOfEach };
            let input = SequenceInput::draft_tree(seq, &tokens, &parents);
            core.session.forward(&[input], rows).map_err(engine)?;
            branch.nodes.extend_from_slice(&tokens);
            branch.version += 1;
            Ok(core.session.take_logits())
        })
    }

    /// Tokens to add to the text.
    fn more(&self, prompt: Prompt) -> PyResult<Text> {
        let begins = exclusive(SESSION, &self.branch)?.tokens.is_empty();
        let tokens = prompt.encode(&self.model, begins)?;
        let vocab = self.model.config().vocab;
        if let Some(&token) = tokens.iter().find(|token| **token as usize >= vocab) {
            return Err(engine(Error::TokenOutsideVocabulary { token, vocab }));
        }
        Ok(Text::More { tokens, begins })
    }
}

/// What a session begins with.
pub enum Beginning {
    Saved(Arc<SavedSession>),
    Prefix(SharedPrefix),
}

impl Beginning {
    pub fn tokens(&self) -> &[u32] {
        match self {
            Beginning::Saved(saved) => saved.tokens(),
            Beginning::Prefix(prefix) => prefix.tokens(),
        }
    }
    pub fn origin(&self) -> &saved::Origin {
        match self {
            Beginning::Saved(saved) => saved.origin(),
            Beginning::Prefix(prefix) => prefix.origin(),
        }
    }
    pub fn check(&self, now: &saved::Origin) -> PyResult<()> {
        let checked = match self {
            Beginning::Saved(saved) => saved.check(now),
            Beginning::Prefix(prefix) => prefix.check(now),
        };
        checked.map_err(mismatch)
    }
}

/// The text of a branch from now on.
pub enum Text {
    /// As it is.
    Same,
    /// With these tokens at its end, which were encoded for a text that begins with them, or for one that does not.
    More { tokens: Vec<u32>, begins: bool },
    /// These tokens alone.
    Whole(Vec<u32>),
}

impl Text {
    fn after(self, branch: &Branch) -> PyResult<Vec<u32>> {
        match self {
            Text::Same => Ok(branch.tokens.clone()),
            Text::Whole(tokens) => Ok(tokens),
            Text::More { tokens, begins } if branch.tokens.is_empty() == begins => {
                Ok([&branch.tokens[..], &tokens].concat())
            }
            Text::More { .. } => {
                Err(Class::Busy.with("another thread has changed this session's text meanwhile"))
            }
        }
    }
}

#[pymethods]
impl Session {
    /// Continues the text, after `prompt` if there is one. Nothing is computed until the first piece is asked for.
    ///
    /// Args:
    ///     prompt: a string or token ids, which are added to the text.
    ///     max_tokens: tokens to generate at most.
    ///     temperature, top_k, top_p, min_p: how tokens are drawn; temperature 0 takes the likeliest. By default as the
    ///         model ships them, then 0.8, 40, 0.95 and 0.05.
    ///     repeat_penalty, repeat_last: makes tokens of the last so many less likely; 1 is off.
    ///     seed: the same seed gives the same text.
    ///     stop: a string or several; the text ends before the first that appears.
    ///     ignore_eos: go on after a token that ends a text.
    ///
    /// Returns:
    ///     Generation: an iterator, also an asynchronous one, over pieces of text.
    ///
    /// Raises:
    ///     ArgumentError: an argument is wrong, or the text does not fit into the cache.
    #[pyo3(signature = (prompt=None, **options))]
    #[pyo3(
        text_signature = "($self, prompt=None, *, max_tokens=256, temperature=None, top_k=None, top_p=None, min_p=None, repeat_penalty=None, repeat_last=None, seed=None, stop=(), ignore_eos=False)"
    )]
    fn generate(
        &self,
        py: Python<'_>,
        prompt: Option<Prompt>,
        options: Option<&Bound<'_, PyDict>>,
    ) -> PyResult<Generation> {
        let mut options = Options::of("generate", options)?;
        let wanted = Wanted::take(&mut options, &self.model)?;
        options.end()?;
        let text = prompt.map_or(Ok(Text::Same), |prompt| self.more(prompt))?;
        self.begin(py, text, &wanted, false)
    }

    /// Answers a conversation. What the session has computed of it already is not computed again.
    #[pyo3(signature = (messages, *, tools=None, template=None, **options))]
    #[pyo3(
        text_signature = "($self, messages, *, tools=None, template=None, max_tokens=256, temperature=None, top_k=None, top_p=None, min_p=None, repeat_penalty=None, repeat_last=None, seed=None, stop=(), ignore_eos=False)"
    )]
    fn chat(
        &self,
        py: Python<'_>,
        messages: &Bound<'_, PyAny>,
        tools: Option<&Bound<'_, PyAny>>,
        template: Option<&Bound<'_, PyAny>>,
        options: Option<&Bound<'_, PyDict>>,
    ) -> PyResult<Generation> {
        let mut options = Options::of("chat", options)?;
        let wanted = Wanted::take(&mut options, &self.model)?;
        options.end()?;
        let tokens = Model::render_for(&self.model, messages, tools, template)?;
        self.begin(py, Text::Whole(tokens), &wanted, true)
    }

    /// Adds tokens to the text and returns logits, float32 `[rows, vocab]`: after the last token, or with rows="all" after
    /// each one, of which there may be `max_rows`. The array owns the memory that the model wrote to: nothing is copied.
    /// After an error the text is as before.
    ///
    /// Args:
    ///     tokens: a string or token ids.
    ///     rows: "last" or "all".
    ///     parents: makes `tokens` nodes of a draft tree behind the text instead: the parent of each, the number of an earlier node, or
    ///         None for the end of the text. Nodes are numbered over several calls; `accept` makes a path of them part of the text.
    ///         Only in kind "tree". What changes the text otherwise drops them.
    #[pyo3(signature = (tokens, *, rows="last", parents=None))]
    fn forward<'py>(
        &self,
        py: Python<'py>,
        tokens: Prompt,
        rows: &str,
        parents: Option<Vec<Option<u32>>>,
    ) -> PyResult<Bound<'py, PyArray2<f32>>> {
        let all = match rows {
            "last" => false,
            "all" => true,
            other => return Err(argument(format!("`rows`: `{other}` is neither `last` nor `all`"))),
        };
        let logits = match parents {
            None => self.forward_text(py, tokens, all)?,
            Some(parents) => self.forward_tree(py, tokens, &parents, all)?,
        };
        let vocab = self.model.config().vocab;
        let n_rows = logits.len() / vocab;
        logits.into_pyarray(py).reshape([n_rows, vocab])
    }

    /// Makes a path of draft nodes part of the text, and drops the others; an empty path drops all. A path is a list of the
    /// numbers of nodes, from a child of the text's end on, each the parent of the next one. No K and V are computed again.
    ///
    /// Raises:
    ///     Refused: the numbers are no path. Nothing changes.
    fn accept(&self, py: Python<'_>, path: Vec<u32>) -> PyResult<()> {
        py.detach(|| {
            let mut branch = exclusive(SESSION, &self.branch)?;
            let pool = branch.pool.clone();
            let mut core = pool.lock();
            let path: Vec<NodeId> = path.into_iter().map(NodeId).collect();
            if core.session.cache().trees().is_none() {
                return Err(argument(NO_TREES));
            }
            branch.accept(&mut core, &path).map_err(engine)?;
            branch.version += 1;
            Ok(())
        })
    }

    /// A session with the same text that shares the cached K and V and copies none. Both go on independently.
    fn fork(&self, py: Python<'_>) -> PyResult<Session> {
        let branch = py.detach(|| {
            let branch = exclusive(SESSION, &self.branch)?;
            let mut core = branch.pool.lock();
            let seq = SeqId(core.next_seq);
            if let Some(keep) = core.session.config().keep {
                return Err(argument(format!(
                    "the cache has room for one text that keeps {keep}: a session without `keep` can fork"
                )));
            }
            let sequences = core.session.cache().sequences();
            let mut sequences = sequences.ok_or_else(|| {
                argument("this kind of cache holds one sequence: use kind=\"cells\", \"tree\" or \"paged\" to fork")
            })?;
            sequences.fork(branch.seq, seq).map_err(|why| refused(&why))?;
            core.next_seq += 1;
            drop(core);
            let (pool, tokens) = (branch.pool.clone(), branch.tokens.clone());
            // The last answer is the other branch's.
            let answer = tokens.len();
            Ok::<_, PyErr>(Branch { pool, seq, tokens, answer, nodes: Vec::new(), version: 0 })
        })?;
        let (model, origin) = (self.model.clone(), self.origin.clone());
        Ok(Session { model, origin, branch: Arc::new(Mutex::new(branch)) })
    }

    /// Writes the text with its K and V to a file: `Model.resume` goes on there, without computing it again. The file is
    /// replaced as a whole or stays as it was, and a new one can be read by its owner alone. The session goes on.
    ///
    /// Args:
    ///     path: the file to write.
    ///     messages: the conversation that the text is, dicts of `role` and `content`, for `kvist chat --resume`.
    ///
    /// Raises:
    ///     FileError: the file cannot be written.
    ///     ArgumentError: nothing is computed yet, or the session keeps only some tokens.
    #[pyo3(signature = (path, *, messages=None))]
    fn save(&self, py: Python<'_>, path: PathBuf, messages: Option<&Bound<'_, PyAny>>) -> PyResult<()> {
        let messages = crate::saved::messages(messages)?;
        without_gil(py, || {
            let branch = exclusive(SESSION, &self.branch)?;
            let mut core = branch.pool.lock();
            if branch.held(&mut core) == 0 {
                return Err(argument("nothing is computed yet: call `generate` or `forward` before `save`"));
            }
            if !branch.nodes.is_empty() {
                return Err(argument("there are draft nodes behind the text: call `accept` before `save`"));
            }
            let origin = self.origin.of(&self.model, core.session.config()).map_err(engine)?;
            let text = SavedText { tokens: &branch.tokens, messages: &messages };
            saved::save(&mut core.session, branch.seq, text, &origin, &path).map_err(file)
        })
    }

    /// Keeps the first `n` tokens of the text; a negative `n` removes that many from its end. What a packed cache may have
    /// lost of the newest tokens is computed again with the next pass.
    fn rollback(&self, py: Python<'_>, n: i64) -> PyResult<()> {
        py.detach(|| {
            let mut branch = exclusive(SESSION, &self.branch)?;
            let len = branch.tokens.len();
            let asked =
                if n < 0 { len.checked_sub(n.unsigned_abs() as usize) } else { usize::try_from(n).ok() };
            let keep = asked.filter(|keep| *keep <= len).ok_or_else(|| {
                argument(format!("the text has {len} tokens: it cannot be rolled back to {n}"))
            })?;
            let pool = branch.pool.clone();
            let text = branch.tokens[..keep].to_vec();
            branch.set(&mut pool.lock(), text).map_err(engine)
        })
    }

    /// The token ids of the whole text.
    #[getter]
    fn tokens(&self) -> PyResult<Vec<u32>> {
        Ok(exclusive(SESSION, &self.branch)?.tokens.clone())
    }
    /// What the tokens say, without control tokens.
    #[getter]
    fn text(&self) -> PyResult<String> {
        let tokens = self.tokens()?;
        crate::arguments::tokenizer(&self.model)?.decode(&tokens).map_err(engine)
    }
    /// Number of tokens that are computed; the others of the text are in the next pass. With `keep` the cache has
    /// removed some of them.
    #[getter]
    fn cached_tokens(&self, py: Python<'_>) -> PyResult<usize> {
        py.detach(|| {
            let branch = exclusive(SESSION, &self.branch)?;
            Ok(branch.held(&mut branch.pool.lock()))
        })
    }
    /// Number of tokens that were removed from the cache to `keep` only some; 0 without it.
    #[getter]
    fn removed_tokens(&self, py: Python<'_>) -> PyResult<u64> {
        py.detach(|| Ok(exclusive(SESSION, &self.branch)?.pool.lock().session.removed_tokens()))
    }
    /// What drafts have achieved in this session and its branches: a dict with `target_passes`, the passes that gave tokens; `drafts`, those
    /// of them with a draft; `drafted` and `accepted`, the tokens that were verified and that were right; `accepted_per_position`, how often
    /// the first, the second token of a draft was; and `failure`, the error of a drafter, only if one has ended speculation. `None` without
    /// `speculate`.
    #[getter]
    fn speculation<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyAny>>> {
        let counts = py.detach(|| {
            let branch = exclusive(SESSION, &self.branch)?;
            let core = branch.pool.lock();
            Ok::<_, PyErr>(core.speculator.as_ref().map(|speculator| speculator.counts().clone()))
        })?;
        counts.map(|counts| crate::speculation::counts(py, &counts)).transpose()
    }
    /// Bytes of K and V that the session and its branches reserve now.
    #[getter]
    fn kv_bytes(&self, py: Python<'_>) -> PyResult<u64> {
        py.detach(|| Ok(exclusive(SESSION, &self.branch)?.pool.lock().session.kv_bytes()))
    }
    /// The kind of the cache.
    #[getter]
    fn kind(&self, py: Python<'_>) -> PyResult<String> {
        py.detach(|| Ok(exclusive(SESSION, &self.branch)?.pool.lock().session.config().kind.clone()))
    }

    /// The contents of the cache, a dict for each layer group.
    fn report<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let reports =
            py.detach(|| Ok::<_, PyErr>(exclusive(SESSION, &self.branch)?.pool.lock().session.report()))?;
        from_json(py, &crate::bookkeeping::report_json(&reports))
    }

    fn __len__(&self) -> PyResult<usize> {
        Ok(exclusive(SESSION, &self.branch)?.tokens.len())
    }
    fn __repr__(&self) -> String {
        match self.branch.try_lock() {
            Ok(branch) => format!("<kvist.Session of {} tokens>", branch.tokens.len()),
            Err(_) => "<kvist.Session in use>".to_owned(),
        }
    }
}

/// Computes `tokens`. Logits are of the last one, or of those from `first` on. On `Err` the cache may hold the first of
/// them.
fn compute(core: &mut Core, seq: SeqId, tokens: &[u32], first: Option<usize>) -> Result<(), Error> {
    let session = &mut core.session;
    let Some(first) = first else {
        return session.prefill(seq, tokens, &mut |_| true).map(drop);
    };
    let (before, wanted) = tokens.split_at(first);
    // Refused before anything is computed.
    let (rows, longest) = (session.config().max_rows as usize, session.config().max_step_tokens as usize);
    if wanted.len() > rows.min(longest) {
        return Err(Error::Usage(format!(
            "{} rows of logits wanted: the session has memory for {rows}, and steps of {longest} tokens (max_rows, chunk)",
            wanted.len()
        )));
    }
    for chunk in before.chunks(longest) {
        session.forward(&[SequenceInput::chain(seq, chunk)], LogitRows::None)?;
    }
    session.forward(&[SequenceInput::chain(seq, wanted)], LogitRows::All)
}
