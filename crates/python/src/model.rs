//! A loaded model.
use crate::arguments::{CacheDefaults, Options, Prompt, Wanted, cache_config, keep, to_json, tokenizer};
use crate::errors::{argument, engine, file};
use crate::generation::Generation;
use crate::loading::{self, Bytes, Loading, compute, load};
use crate::prefix;
use crate::saved::{Prefix, PrefixArgument, SavedArgument};
use crate::session::{Beginning, Session, Text};
use crate::speculation::Drafts;
use crate::wait::without_gil;
use kvist_cache::SeqId;
use kvist_device::Registry;
use kvist_engine::devices::Place;
use kvist_engine::frozen::{freeze, share};
use kvist_engine::memory::CacheConfig;
use kvist_engine::saved::LateOrigin;
use kvist_model::LoadOptions;
use kvist_model::template::Conversation;
use pyo3::prelude::*;
use pyo3::types::PyDict;
use std::path::PathBuf;
use std::sync::Arc;

/// A model's weights, tokenizer and chat template. Sessions of one model share its weights.
///
/// Args:
///     path: a Hugging Face folder, a .gguf file, or a name such as "hf:ORG/NAME"; without it the embedded model.
///     weights: how linear layers are stored in memory: "as-stored", "f32", "q8_0" or "int8".
///     context: tokens of the longest text, for models whose RoPE depends on it.
///     threads: compute threads; by default one per core.
///     deterministic: make a text independent of batches and shared prefixes, to the last bit; a little slower.
///     fast_prefill: compute prompts with fewer bits where the CPU has AVX2, AVX-512 or AMX: faster, and slightly different from
///         batch to batch. Not with deterministic.
///     memory: bytes, or a size such as "8GB", that weights and caches may take together; by default what is free, on a GPU with memory
///         of its own there.
///     backend: where it runs: "cpu", or a GPU: "wgpu", "wgpu:1", "cuda", "cuda:1", in builds that have them. Sessions and batches are
///         there, too.
///     mmap: map the files, which must not change as long as the model is used, instead of reading them.
///     offline: download nothing.
///
/// Raises:
///     ModelError: the files cannot be read, or are not those of a model that kvist runs.
///     OutOfMemory: the weights do not fit.
#[pyclass(frozen, module = "kvist")]
pub struct Model {
    pub model: Arc<kvist_model::Model>,
    pub place: Place,
    /// That of its caches.
    pub backend: String,
    /// What K and V of texts depend on, for files.
    pub origin: Arc<LateOrigin>,
    pub loading: Loading,
}

/// Default context of a session, in tokens, if the model was trained on more.
const CONTEXT: u32 = 4096;

#[pymethods]
impl Model {
    #[new]
    #[pyo3(signature = (path=None, *, weights="as-stored", context=None, threads=None, deterministic=false, fast_prefill=false, memory=None, backend="cpu", mmap=true, offline=false))]
    #[allow(clippy::too_many_arguments)] // keyword arguments
    fn new(
        py: Python<'_>,
        path: Option<PathBuf>,
        weights: &str,
        context: Option<u32>,
        threads: Option<usize>,
        deterministic: bool,
        fast_prefill: bool,
        memory: Option<Bytes>,
        backend: &str,
        mmap: bool,
        offline: bool,
    ) -> PyResult<Self> {
        let format = weights.parse().map_err(|why| argument(format!("`weights`: {why}")))?;
        let memory = memory.map(|bytes| bytes.get("memory")).transpose()?;
        let compute = compute(threads, deterministic, fast_prefill)?;
        let options = LoadOptions { format, mmap, context, ..LoadOptions::default() };
        let loading = Loading { format, mmap, offline, is_embedded: path.is_none() };
        let ((place, backend), (model, origin)) = without_gil(py, || {
            let (place, backend) = loading::place(backend, &compute)?;
            let loaded = load(path, &options, &place, memory, offline)?;
            Ok::<_, PyErr>(((place, backend), loaded))
        })?;
        Ok(Model { model: Arc::new(model), place, backend, origin: Arc::new(origin), loading })
    }

    /// The model's name: its path, or the name that it was loaded by.
    #[getter]
    fn name(&self) -> &str {
        self.model.name()
    }
    /// The backend that it runs on: "cpu", "wgpu" or "cuda".
    #[getter]
    fn backend(&self) -> &str {
        &self.backend
    }
    /// Number of tokens of the vocabulary.
    #[getter]
    fn vocab_size(&self) -> usize {
        self.model.config().vocab
    }
    /// Tokens of context that the model was trained on.
    #[getter]
    fn context(&self) -> u32 {
        self.model.config().context
    }
    /// Number of decoder layers.
    #[getter]
    fn n_layers(&self) -> usize {
        self.model.layout().layers.len()
    }
    /// Tokens that end a text.
    #[getter]
    fn end_tokens(&self) -> Vec<u32> {
        self.model.end_tokens().to_vec()
    }
    /// Whether `chat` works. Without a template a model only continues texts.
    #[getter]
    fn has_chat_template(&self) -> bool {
        self.model.chat_template().is_some()
    }

    /// The tokens of a text. `special` adds the marks of a text's beginning, if the model has any.
    #[pyo3(signature = (text, *, special=true))]
    fn encode(&self, text: &str, special: bool) -> PyResult<Vec<u32>> {
        tokenizer(&self.model)?.encode(text, special).map_err(engine)
    }

    /// The text of tokens, without control tokens.
    fn decode(&self, tokens: Vec<u32>) -> PyResult<String> {
        let vocab = self.model.config().vocab;
        if let Some(&token) = tokens.iter().find(|token| **token as usize >= vocab) {
            return Err(engine(kvist_model::Error::TokenOutsideVocabulary { token, vocab }));
        }
        tokenizer(&self.model)?.decode(&tokens).map_err(engine)
    }

    /// A session with a cache of its own.
    ///
    /// Args:
    ///     kind: contiguous, ring (needs a window), cells, tree or paged; by default cells, and tree where drafts are trees.
    ///     kv, kv_v: storage of K and V, and of V if it differs: f32, f16, bf16, q8, q4, t4, and their variants.
    ///     context: tokens that the cache holds, over all branches; by default the model's context, at most 4096.
    ///     window, sinks: tokens that a query sees, and first tokens that stay visible beside them.
    ///     chunk: tokens of the largest pass, by default 256, and over CUDA 1024.
    ///     recent: tokens of a group that packed storages also keep in f16; 0 for none.
    ///     max_rows: rows of logits that a pass can return.
    ///     backend: that of the model; or "reference", which is slow, for a model on the CPU.
    ///     keep: which tokens stay of a text that outgrows its cache, such as "sinks=4,recent=1024,top=2048": the first, the newest, and
    ///         those between them that matter most. Others are removed, so answers change. `context` is then the longest text,
    ///         by default the model's context. The kind is cells, tree or paged; the session has one branch, and is not saved.
    ///     prefix: a `Prefix`, or its path, that the text begins with: it is not computed, and on the CPU its memory is shared. `kv` is then
    ///         that of the prefix unless given.
    ///     speculate: what proposes tokens, of which several are verified in one pass: the same texts, sooner where proposals are right.
    ///         "auto" (as much as pays off), "ngram", "suffix", "draft" (a smaller model) or "eagle" (a head); None or "off" for none.
    ///         Not with `keep`.
    ///     draft_model: for "draft", "eagle" and "auto": a `Model` with the same vocabulary, or where one is; or the folder of a head. A path
    ///         is loaded for this session alone, in the model's `memory`. The embedded model has both of its own.
    ///     draft_tokens, draft_depth, draft_width: most tokens of a draft (16), of a path in it (8; 5 with "draft"), and continuations of
    ///         the same token (4; 1 with "draft"). With 1, drafts are chains, which every kind verifies; trees need tree or paged.
    ///
    /// Raises:
    ///     ArgumentError: an argument is wrong, or the draft model has another vocabulary.
    ///     OutOfMemory: the bound on the session's memory does not fit; nothing was allocated.
    ///     FileError, MismatchError: the prefix cannot be used.
    #[pyo3(signature = (*, kind=None, prefix=None, **options))]
    #[pyo3(
        text_signature = "($self, *, kind=None, prefix=None, keep=None, kv='f16', kv_v=None, context=None, window=None, sinks=0, chunk=None, recent=16, max_rows=1, backend=None, speculate=None, draft_model=None, draft_tokens=16, draft_depth=None, draft_width=None)"
    )]
    fn session(
        &self,
        py: Python<'_>,
        kind: Option<&str>,
        prefix: Option<PrefixArgument<'_>>,
        options: Option<&Bound<'_, PyDict>>,
    ) -> PyResult<Session> {
        let mut options = Options::of("session", options)?;
        let keep = keep(&mut options)?;
        if let Some(prefix) = prefix {
            if keep.is_some() {
                return Err(argument("`keep`: a prefix is kept whole: leave out `keep` or `prefix`"));
            }
            return self.session_of(py, &Beginning::Prefix(prefix.get(py)?), kind, options);
        }
        let defaults = match keep {
            Some(_) => self.defaults_of(self.model.config().context),
            None => self.defaults(),
        };
        let drafts = Drafts::take(&mut options)?;
        let kind = kind_for(kind, "cells", drafts.as_ref());
        let mut config = CacheConfig { keep, ..cache_config(&mut options, kind, &defaults)? };
        options.end()?;
        if let Some(drafts) = &drafts {
            let context = config.context_tokens;
            drafts.prepare(&mut config, Some(context))?;
        }
        self.open(py, &config, drafts)
    }

    /// A session that goes on where one was saved, without computing its text again. The next logits are the same to the bit, on
    /// the same machine with the same kvist.
    ///
    /// Args:
    ///     saved: a file of `Session.save` or of `kvist run --save-session`, or a `SavedSession`.
    ///     kind, kv, kv_v, context, window, sinks, chunk, recent, max_rows, backend: as for `session`. `kv`, `kv_v` and `recent` are
    ///         those of the file, and others are refused; the kind may be another. `context` has room for 256 tokens more.
    ///     speculate, draft_model, draft_tokens, draft_depth, draft_width: as for `session`.
    ///
    /// Raises:
    ///     FileError: the file cannot be read, is torn or has changed.
    ///     MismatchError: it was made with other weights, another tokenizer, another storage or window: the text says which.
    #[pyo3(signature = (saved, *, kind=None, **options))]
    #[pyo3(
        text_signature = "($self, saved, *, kind=None, kv=None, kv_v=None, context=None, window=None, sinks=0, chunk=None, recent=None, max_rows=1, backend=None, speculate=None, draft_model=None, draft_tokens=16, draft_depth=None, draft_width=None)"
    )]
    fn resume(
        &self,
        py: Python<'_>,
        saved: SavedArgument<'_>,
        kind: Option<&str>,
        options: Option<&Bound<'_, PyDict>>,
    ) -> PyResult<Session> {
        let options = Options::of("resume", options)?;
        self.session_of(py, &Beginning::Saved(saved.get(py)?), kind, options)
    }

    /// Computes the beginning of prompts and writes it with its K and V, for `session(prefix=...)`, `Batch(prefix=...)` and
    /// `kvist serve --prefix`.
    ///
    /// Args:
    ///     prompt: a string or token ids.
    ///     path: the file to write. It is replaced as a whole or stays as it was.
    ///     system: `prompt` is the system message of conversations; freeze what all of them begin with.
    ///     kv, kv_v, window, sinks, chunk, recent: as for `session`. Sessions that begin with the prefix have the same.
    ///
    /// Returns:
    ///     Prefix: the file, opened.
    ///
    /// Raises:
    ///     FileError: the file cannot be written.
    #[pyo3(signature = (prompt, path, *, system=false, **options))]
    #[pyo3(
        text_signature = "($self, prompt, path, *, system=False, kv='f16', kv_v=None, window=None, sinks=0, chunk=None, recent=16)"
    )]
    fn freeze_prefix(
        &self,
        py: Python<'_>,
        prompt: Prompt,
        path: PathBuf,
        system: bool,
        options: Option<&Bound<'_, PyDict>>,
    ) -> PyResult<Prefix> {
        let options = Options::of("freeze_prefix", options)?;
        prefix::compute(
            py,
            self,
            (prompt, system),
            options,
            prefix::Place::File,
            |session, text, origin| freeze(session, SeqId::ONLY, text, origin, &path).map_err(file),
        )?;
        Prefix::open(py, path)
    }

    /// Computes the beginning of prompts as `freeze_prefix` does, and keeps it in memory instead of a file. All sessions and batches
    /// of this process that begin with it share its memory, which is freed when the `Prefix` and the last of them are gone, in any
    /// order.
    ///
    /// Args:
    ///     prompt, system, kv, kv_v, window, sinks, chunk, recent: as for `freeze_prefix`.
    ///
    /// Returns:
    ///     Prefix: its `path` is `None`.
    ///
    /// Raises:
    ///     OutOfMemory: the model's `memory` has no room for the prefix and for the session that computes it; nothing was computed.
    ///     Error: the model runs on a GPU.
    #[pyo3(signature = (prompt, *, system=false, **options))]
    #[pyo3(
        text_signature = "($self, prompt, *, system=False, kv='f16', kv_v=None, window=None, sinks=0, chunk=None, recent=16)"
    )]
    fn share_prefix(
        &self,
        py: Python<'_>,
        prompt: Prompt,
        system: bool,
        options: Option<&Bound<'_, PyDict>>,
    ) -> PyResult<Prefix> {
        let options = Options::of("share_prefix", options)?;
        prefix::compute(
            py,
            self,
            (prompt, system),
            options,
            prefix::Place::Memory,
            |session, text, origin| {
                let prefix = share(session, SeqId::ONLY, text, origin).map_err(file)?;
                Ok(Prefix { prefix })
            },
        )
    }

    /// Continues a prompt in a session of its own. See `Session.generate` for the options of a text, and `session` for
    /// those of its cache.
    #[pyo3(signature = (prompt, **options))]
    #[pyo3(
        text_signature = "($self, prompt, *, max_tokens=256, temperature=None, top_k=None, top_p=None, min_p=None, repeat_penalty=None, repeat_last=None, seed=None, stop=(), ignore_eos=False, kv='f16', kv_v=None, context=None, keep=None, speculate=None, draft_model=None)"
    )]
    fn generate(
        &self,
        py: Python<'_>,
        prompt: Prompt,
        options: Option<&Bound<'_, PyDict>>,
    ) -> PyResult<Generation> {
        let tokens = prompt.encode(&self.model, true)?;
        let mut options = Options::of("generate", options)?;
        let wanted = Wanted::take(&mut options, &self.model)?;
        let session = self.session_for(py, options, tokens.len(), &wanted)?;
        session.begin(py, Text::Whole(tokens), &wanted, false)
    }

    /// Answers a conversation in a session of its own.
    ///
    /// Args:
    ///     messages: dicts with `role` and `content`, as in the OpenAI API; text only.
    ///     tools: descriptions of functions, for the template.
    ///     template: further variables of the template, such as {"enable_thinking": False}.
    #[pyo3(signature = (messages, *, tools=None, template=None, **options))]
    #[pyo3(
        text_signature = "($self, messages, *, tools=None, template=None, max_tokens=256, temperature=None, top_k=None, top_p=None, min_p=None, repeat_penalty=None, repeat_last=None, seed=None, stop=(), ignore_eos=False, kv='f16', kv_v=None, context=None, keep=None, speculate=None, draft_model=None)"
    )]
    fn chat(
        &self,
        py: Python<'_>,
        messages: &Bound<'_, PyAny>,
        tools: Option<&Bound<'_, PyAny>>,
        template: Option<&Bound<'_, PyAny>>,
        options: Option<&Bound<'_, PyDict>>,
    ) -> PyResult<Generation> {
        let tokens = Self::render_for(&self.model, messages, tools, template)?;
        let mut options = Options::of("chat", options)?;
        let wanted = Wanted::take(&mut options, &self.model)?;
        let session = self.session_for(py, options, tokens.len(), &wanted)?;
        session.begin(py, Text::Whole(tokens), &wanted, true)
    }

    /// The tokens of a conversation, up to where the answer begins.
    #[pyo3(signature = (messages, *, tools=None, template=None))]
    fn render(
        &self,
        messages: &Bound<'_, PyAny>,
        tools: Option<&Bound<'_, PyAny>>,
        template: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Vec<u32>> {
        Self::render_for(&self.model, messages, tools, template)
    }

    fn __repr__(&self) -> String {
        let config = self.model.config();
        format!(
            "<kvist.Model {:?}, {} layers, vocabulary {}>",
            self.model.name(),
            self.n_layers(),
            config.vocab
        )
    }
}

impl Model {
    /// The tokens of a conversation, up to where the answer begins.
    pub fn render_for(
        model: &kvist_model::Model,
        messages: &Bound<'_, PyAny>,
        tools: Option<&Bound<'_, PyAny>>,
        template: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Vec<u32>> {
        let chat = model.chat_template().ok_or_else(|| {
            argument("this model has no chat template, so it continues texts: use `generate`")
        })?;
        let list =
            |name: &str, value: Option<&Bound<'_, PyAny>>| match value.map(|value| to_json(name, value)) {
                None => Ok(Vec::new()),
                Some(Ok(serde_json::Value::Array(items))) => Ok(items),
                Some(Ok(_)) => Err(argument(format!("`{name}` is not a list"))),
                Some(Err(error)) => Err(error),
            };
        let kwargs = match template.map(|template| to_json("template", template)).transpose()? {
            None => serde_json::Map::new(),
            Some(serde_json::Value::Object(fields)) => fields,
            Some(_) => return Err(argument("`template` is not a dict")),
        };
        let (messages, tools) = (list("messages", Some(messages))?, list("tools", tools)?);
        if messages.is_empty() {
            return Err(argument("`messages` is empty: give at least one"));
        }
        let conversation =
            Conversation { messages: &messages, tools: &tools, add_generation_prompt: true, kwargs: &kwargs };
        let tokenizer = tokenizer(model)?;
        let text = chat.render_conversation(&conversation, tokenizer).map_err(engine)?;
        tokenizer.encode(&text, false).map_err(engine)
    }

    pub fn registry(&self) -> Registry {
        self.place.registry()
    }

    fn open(&self, py: Python<'_>, config: &CacheConfig, drafts: Option<Drafts>) -> PyResult<Session> {
        let registry = self.registry();
        let speculator = |drafts: Drafts| drafts.of_session(self, &registry, config);
        let speculator = without_gil(py, || drafts.map(speculator).transpose())?;
        Session::open(py, (&self.model, &self.origin), &registry, config, speculator)
    }

    fn defaults(&self) -> CacheDefaults {
        self.defaults_of(self.model.config().context.min(CONTEXT))
    }

    fn defaults_of(&self, context: u32) -> CacheDefaults {
        CacheDefaults::new(context).on(&self.backend)
    }

    /// A session that begins with a file.
    fn session_of(
        &self,
        py: Python<'_>,
        beginning: &Beginning,
        kind: Option<&str>,
        mut options: Options<'_>,
    ) -> PyResult<Session> {
        let defaults = self.defaults().of_file(&beginning.origin().cache, beginning.tokens().len());
        let drafts = Drafts::take(&mut options)?;
        let kind = kind_for(kind, "cells", drafts.as_ref());
        let mut config = cache_config(&mut options, kind, &defaults)?;
        options.end()?;
        if let Some(drafts) = &drafts {
            let context = config.context_tokens;
            drafts.prepare(&mut config, Some(context))?;
        }
        // Before memory is reserved.
        without_gil(py, || beginning.check(&self.origin.of(&self.model, &config).map_err(engine)?))?;
        let session = self.open(py, &config, drafts)?;
        session.begin_with(py, beginning)?;
        Ok(session)
    }

    /// A session for one text: as long as the prompt and what is to be generated, within the model's context.
    fn session_for(
        &self,
        py: Python<'_>,
        mut options: Options<'_>,
        prompt: usize,
        wanted: &Wanted,
    ) -> PyResult<Session> {
        let drafts = Drafts::take(&mut options)?;
        // Those that may be rejected need cells too.
        let room = drafts.as_ref().map_or(0, |drafts| drafts.options.tokens as usize);
        let needed = prompt.saturating_add(wanted.limits.max_tokens).saturating_add(room).max(1);
        let context = u32::try_from(needed).unwrap_or(u32::MAX).min(self.model.config().context);
        let keep = keep(&mut options)?;
        let kind = if keep.is_some() { "cells" } else { "contiguous" };
        let kind = kind_for(None, kind, drafts.as_ref());
        let mut config =
            CacheConfig { keep, ..cache_config(&mut options, kind, &self.defaults_of(context))? };
        options.end()?;
        if let Some(drafts) = &drafts {
            drafts.prepare(&mut config, None)?;
        }
        self.open(py, &config, drafts)
    }
}

/// The kind that is asked for, or else `usual`, or one that verifies the trees of `drafts`.
fn kind_for<'k>(asked: Option<&'k str>, usual: &'k str, drafts: Option<&Drafts>) -> &'k str {
    let grows_trees = drafts.is_some_and(|drafts| drafts.options.grows_trees());
    asked.unwrap_or(if grows_trees { "tree" } else { usual })
}
