//! Builds a tokenizer from a GGUF file's vocabulary: byte-level BPE (`gpt2`) or SentencePiece BPE (`llama`).
use super::{Tokenizer, stops};
use crate::error::Error;
use crate::weights::Gguf;
use std::borrow::Cow;
use tokenizers::decoders::DecoderWrapper;
use tokenizers::decoders::byte_fallback::ByteFallback;
use tokenizers::decoders::fuse::Fuse;
use tokenizers::decoders::strip::Strip;
use tokenizers::models::bpe::BPE;
use tokenizers::normalizers::replace::Replace;
use tokenizers::normalizers::{NormalizerWrapper, Prepend};
use tokenizers::pre_tokenizers::PreTokenizerWrapper;
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::pre_tokenizers::digits::Digits;
use tokenizers::pre_tokenizers::split::{Split, SplitPattern};
use tokenizers::{AddedToken, SplitDelimiterBehavior};

/// How words are separated before BPE, by llama.cpp's name for it.
fn pre_tokenizer(name: &str) -> (Option<&'static str>, bool) {
    // (a pattern, or GPT-2's own; digits one by one)
    match name {
        "llama-bpe" | "llama3" | "llama-v3" | "dbrx" | "smaug-bpe" | "falcon3" | "pixtral" => (
            Some(
                r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
            ),
            false,
        ),
        "qwen2" | "deepseek-r1-qwen" => (
            Some(
                r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
            ),
            false,
        ),
        // GPT-4o, gpt-oss and Phi-4-mini: a word does not end in capitals.
        "gpt-4o" | "llama4" => (
            Some(
                r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
            ),
            false,
        ),
        // Mistral since Nemo.
        "tekken" => (
            Some(
                r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
            ),
            false,
        ),
        "smollm" => (None, true),
        _ => (None, false),
    }
}

/// True if [`pre_tokenizer`] supports this name, including GPT-2's own.
fn is_known(pre: &str) -> bool {
    ["gpt-2", "gpt2"].contains(&pre) || pre_tokenizer(pre) != (None, false)
}

/// What converters write where they do not know how the model cuts words. llama.cpp assumes it in files older than the
/// key.
pub(super) const UNNAMED: &str = "default";

/// The name of the file's pre-tokenizer. Where it is missing, what the architecture leaves no doubt about.
fn pre_name(gguf: &Gguf, n_tokens: usize) -> Result<&str, Error> {
    let m = &gguf.metadata;
    match m.text("tokenizer.ggml.pre")? {
        Some(pre) if pre != UNNAMED => return Ok(pre),
        _ => {}
    }
    Ok(match (m.text("general.architecture")?, n_tokens) {
        (Some("qwen2"), _) => "qwen2",
        (Some("llama"), 128_256) => "llama-bpe", // Llama 3
        _ => UNNAMED,
    })
}

/// Texts and ids. Large vocabularies are looked up a million times while a file is read.
type Vocabulary<'t> = ahash::AHashMap<&'t str, u32>;

/// Token types of `tokenizer.ggml.token_type`.
const NORMAL: i64 = 1;
const CONTROL: i64 = 3;
const USER_DEFINED: i64 = 4;

impl Tokenizer {
    /// Returns `None` if the file has no vocabulary.
    pub fn from_gguf(gguf: &Gguf) -> Result<Option<Self>, Error> {
        let m = &gguf.metadata;
        let bad = |what: String| Error::Tokenizer { file: gguf.file().into(), what };
        let (Some(model), Some(tokens)) =
            (m.text("tokenizer.ggml.model")?, m.texts("tokenizer.ggml.tokens")?)
        else {
            return Ok(None);
        };
        if u32::try_from(tokens.len()).is_err() {
            return Err(bad(format!("has {} tokens", tokens.len())));
        }
        let pre = pre_name(gguf, tokens.len())?;
        let kinds = kinds(tokens, m.ints("tokenizer.ggml.token_type")?.unwrap_or_default());
        let tokens = if model == "llama" { with_spaces(tokens, &kinds) } else { Cow::Borrowed(tokens) };
        let tokens = tokens.as_ref();
        let vocab: Vocabulary<'_> = tokens.iter().map(String::as_str).zip(0..).collect();
        let mut inner = match model {
            "gpt2" => byte_level(gguf, &vocab, pre)?,
            "llama" => sentence_piece(gguf, tokens, &vocab)?,
            other => return Err(bad(format!("is of the kind `{other}`; kvist supports gpt2 and llama"))),
        };

        // Not normalized: they are looked for in the text as it is. A normalizer puts a space in front of every piece, which would
        // then belong to the token.
        let added = |kind: i64| {
            let of_kind = tokens.iter().zip(&kinds).filter(|(_, t)| **t == kind);
            let token = |text: &String| AddedToken::from(text.clone(), kind == CONTROL).normalized(false);
            of_kind.map(|(text, _)| token(text)).collect::<Vec<_>>()
        };
        inner.add_special_tokens(added(CONTROL)).map_err(|e| bad(e.to_string()))?;
        inner.add_tokens(added(USER_DEFINED)).map_err(|e| bad(e.to_string()))?;

        let text_of = |id: Option<u32>| id.and_then(|id| tokens.get(id as usize).cloned());
        let bos = m.token("tokenizer.ggml.bos_token_id")?;
        let eos = m.token("tokenizer.ggml.eos_token_id")?;
        // llama.cpp's defaults for missing keys.
        let with_bos = ["llama-bpe", "tekken"].contains(&pre);
        let adds_bos = m.flag("tokenizer.ggml.add_bos_token")?.unwrap_or(model == "llama" || with_bos);
        Ok(Some(Tokenizer {
            cuts: super::cuts_of(&inner),
            inner,
            file: gguf.file().into(),
            unknown_pre: (model == "gpt2" && !is_known(pre)).then(|| pre.to_string()),
            prepend: bos.filter(|_| adds_bos),
            eos,
            bos_text: text_of(bos),
            eos_text: text_of(eos),
        }))
    }
}

/// The type of every token. A token that ends the model's output is a control token, as in llama.cpp, whatever the file says.
fn kinds(tokens: &[String], given: &[i64]) -> Vec<i64> {
    let mut kinds = given.to_vec();
    kinds.resize(tokens.len(), NORMAL);
    for end in stops::end_tokens(tokens) {
        kinds[end as usize] = CONTROL;
    }
    kinds
}

/// SentencePiece's vocabulary with its user-defined tokens as they are in a text: newer converters write their spaces as spaces, older
/// ones as U+2581.
fn with_spaces<'t>(tokens: &'t [String], kinds: &[i64]) -> Cow<'t, [String]> {
    let is_marked = |(token, kind): (&String, &i64)| *kind == USER_DEFINED && token.contains('▁');
    if !tokens.iter().zip(kinds).any(is_marked) {
        return Cow::Borrowed(tokens);
    }
    let known: ahash::AHashSet<&str> = tokens.iter().map(String::as_str).collect();
    let spaced = tokens.iter().zip(kinds).map(|(token, kind)| {
        let spaced = is_marked((token, kind)).then(|| token.replace('▁', " "));
        spaced.filter(|text| !known.contains(text.as_str())).unwrap_or_else(|| token.clone())
    });
    Cow::Owned(spaced.collect())
}

fn byte_level(gguf: &Gguf, vocab: &Vocabulary<'_>, pre: &str) -> Result<tokenizers::Tokenizer, Error> {
    let bad = |what: String| Error::Tokenizer { file: gguf.file().into(), what };
    let m = &gguf.metadata;
    let lines = m.texts("tokenizer.ggml.merges")?.ok_or_else(|| bad("has no merges".into()))?;
    let mut merges = Vec::with_capacity(lines.len());
    for line in lines {
        let pair = line
            .split_once(' ')
            .ok_or_else(|| bad(format!("has the merge `{line}`, which is not a pair")))?;
        merges.push((pair.0.to_string(), pair.1.to_string()));
    }
    let bpe = BPE::builder()
        .vocab_and_merges(owned(vocab), merges)
        .ignore_merges(["llama-bpe", "tekken"].contains(&pre))
        .build()
        .map_err(|e| bad(e.to_string()))?;
    let mut tokenizer = tokenizers::Tokenizer::new(bpe);
    let (pattern, digits) = pre_tokenizer(pre);
    let mut steps: Vec<PreTokenizerWrapper> = Vec::new();
    if digits {
        steps.push(Digits::new(true).into());
    }
    if let Some(pattern) = pattern {
        let pattern = SplitPattern::Regex(pattern.into());
        let split = Split::new(pattern, SplitDelimiterBehavior::Isolated, false);
        steps.push(split.map_err(|e| bad(e.to_string()))?.into());
    }
    steps.push(ByteLevel::new(false, true, pattern.is_none()).into());
    tokenizer
        .with_pre_tokenizer(Some(tokenizers::pre_tokenizers::sequence::Sequence::new(steps)))
        .with_decoder(Some(ByteLevel::default()));
    Ok(tokenizer)
}

/// SentencePiece BPE stores scores instead of merges. Every way to form a token from two others is a merge, better
/// scores first (as transformers reconstructs them).
fn sentence_piece(
    gguf: &Gguf,
    tokens: &[String],
    vocab: &Vocabulary<'_>,
) -> Result<tokenizers::Tokenizer, Error> {
    let bad = |what: String| Error::Tokenizer { file: gguf.file().into(), what };
    let m = &gguf.metadata;
    let scores = m.floats("tokenizer.ggml.scores")?.ok_or_else(|| bad("has no scores".into()))?;
    if scores.len() != tokens.len() {
        return Err(bad(format!("has {} scores for {} tokens", scores.len(), tokens.len())));
    }
    let mut merges = Vec::new();
    for (token, score) in tokens.iter().zip(scores) {
        let mut ways: Vec<(&str, &str)> = token
            .char_indices()
            .skip(1)
            .map(|(at, _)| token.split_at(at))
            .filter(|(left, right)| vocab.contains_key(left) && vocab.contains_key(right))
            .collect();
        ways.sort_by_key(|(left, right)| (vocab[left], vocab[right]));
        merges.extend(ways.into_iter().map(|way| (*score, way)));
    }
    merges.sort_by(|a, b| b.0.total_cmp(&a.0)); // stable sort
    let merges = merges.into_iter().map(|(_, (l, r))| (l.to_string(), r.to_string())).collect();
    let unknown = m.token("tokenizer.ggml.unknown_token_id")?.unwrap_or(0);
    let mut builder =
        BPE::builder().vocab_and_merges(owned(vocab), merges).fuse_unk(true).byte_fallback(true);
    if let Some(unknown) = tokens.get(unknown as usize) {
        builder = builder.unk_token(unknown.clone());
    }
    let mut tokenizer = tokenizers::Tokenizer::new(builder.build().map_err(|e| bad(e.to_string()))?);
    let prefix = m.flag("tokenizer.ggml.add_space_prefix")?.unwrap_or(true);
    let mut steps: Vec<NormalizerWrapper> = Vec::new();
    if prefix {
        steps.push(Prepend::new("▁".into()).into());
    }
    steps.push(Replace::new(" ", "▁").map_err(|e| bad(e.to_string()))?.into());
    let mut decoders: Vec<DecoderWrapper> = vec![
        Replace::new("▁", " ").map_err(|e| bad(e.to_string()))?.into(),
        ByteFallback::new().into(),
        Fuse::new().into(),
    ];
    if prefix {
        decoders.push(Strip::new(' ', 1, 0).into());
    }
    tokenizer
        .with_normalizer(Some(tokenizers::normalizers::Sequence::new(steps)))
        .map_err(|e| bad(e.to_string()))?
        .with_decoder(Some(tokenizers::decoders::sequence::Sequence::new(decoders)));
    Ok(tokenizer)
}

fn owned(vocab: &Vocabulary<'_>) -> ahash::AHashMap<String, u32> {
    vocab.iter().map(|(text, id)| (text.to_string(), *id)).collect()
}
