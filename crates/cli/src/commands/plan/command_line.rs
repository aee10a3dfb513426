//! A recommendation as a command line: the flags that make exactly this cache.
use super::Args;
use super::candidates::{Candidate, Command};
use kvist_device::Recent;
use kvist_engine::memory::RECENT_TOKENS;
use kvist_model::weights::WeightFormat;
use std::path::{Path, PathBuf};

pub fn of(args: &Args, candidate: &Candidate) -> String {
    let mut words: Vec<String> = vec!["kvist".into()];
    let mut flag =
        |name: &str, value: Option<String>| words.extend(value.map(|value| format!("{name} {value}")));
    let runs = candidate.command == Command::Run;
    let cache = &candidate.cache;
    let differs = |differs: bool, value: String| differs.then_some(value);
    flag(if runs { "run" } else { "serve" }, Some(String::new()));
    flag("--model", args.source.model.as_deref().map(model));
    flag("--weights", differs(args.weights != WeightFormat::AsStored, args.weights.to_string()));
    flag("--memory", args.memory.map(|size| size.to_string()));
    flag("--threads", args.compute.threads.map(|threads| threads.to_string()));
    flag("--deterministic", differs(args.compute.deterministic, String::new()));
    flag("--fast-prefill", differs(args.compute.fast_prefill, String::new()));
    if runs {
        flag("--backend", differs(cache.backend != "cpu", args.cache.backend.clone()));
        flag("--kind", Some(candidate.kind.into()));
        flag("--window", cache.window.map(|window| window.to_string()));
        flag("--sinks", differs(cache.sinks > 0, cache.sinks.to_string()));
        flag("--chunk", args.cache.chunk.map(|chunk| chunk.to_string()));
    }
    flag("--kv", Some(cache.k.to_string()));
    flag("--kv-v", differs(cache.v != cache.k, cache.v.to_string()));
    let recent = cache.recent.tokens;
    let default = Recent { tokens: RECENT_TOKENS, ..cache.recent };
    let matters = default.of_storages(cache.k, cache.v).tokens > 0;
    flag("--kv-recent", differs(matters && recent != RECENT_TOKENS, recent.to_string()));
    flag("--context", Some(cache.context_tokens.to_string()));
    if !runs {
        for (name, value) in args.tiers.as_typed() {
            flag(name, Some(if value.is_empty() { value } else { quoted(&value) }));
        }
    }
    words.iter().map(|word| word.trim_end()).collect::<Vec<_>>().join(" ")
}

/// The argument of `--model`: for a config.json its folder, where its weights belong.
fn model(typed: &Path) -> String {
    let is_config = typed.extension().is_some_and(|extension| extension == "json");
    let folder = || typed.parent().filter(|folder| !folder.as_os_str().is_empty());
    let path = match is_config {
        true => folder().map_or_else(|| PathBuf::from("."), Path::to_path_buf),
        false => typed.to_path_buf(),
    };
    quoted(&path.display().to_string())
}

/// Quotes a word for a shell.
fn quoted(word: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_./:@+,=%".contains(c);
    if !word.is_empty() && word.chars().all(plain) {
        return word.into();
    }
    format!("'{}'", word.replace('\'', r"'\''"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_model_is_named_for_a_shell() {
        for (typed, expected) in [
            ("hf:Qwen/Qwen3-0.6B:Q8_0", "hf:Qwen/Qwen3-0.6B:Q8_0"),
            ("./config.json", "."),
            ("config.json", "."),
            ("models/a/config.json", "models/a"),
            ("my models/a.gguf", "'my models/a.gguf'"),
            ("it's; rm", r"'it'\''s; rm'"),
        ] {
            assert_eq!(model(Path::new(typed)), expected);
        }
    }
}
