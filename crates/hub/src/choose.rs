//! Chooses which files of a repository make up the requested model. It only looks at file names, so the same
//! rules apply to the Hub and to a cache.
use crate::error::closest;
use crate::{Error, HubName};

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Selection {
    /// The parts of a GGUF model in order.
    Gguf(Vec<String>),
    /// A safetensors folder.
    Folder { texts: Vec<String>, weights: Weights },
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Weights {
    Single(String),
    /// The index file, which names the shards.
    Index(String),
}

/// Preferred quantisations if none is asked for; llama.cpp prefers the same.
const DEFAULT_QUANTS: [&str; 2] = ["Q4_K_M", "Q8_0"];

/// Files besides the weights that the engine reads from a folder.
const TEXTS: [&str; 7] = [
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "additional_chat_templates/tool_use.jinja",
];
const SINGLE: &str = "model.safetensors";
pub(crate) const INDEX: &str = "model.safetensors.index.json";

/// Chooses from all `paths` of a repository the files that `name` means. Without a quantisation or file in the
/// name, a safetensors model is preferred over GGUF files.
pub(crate) fn choose(name: &HubName, paths: &[&str]) -> Result<Selection, Error> {
    let has = |path: &str| paths.contains(&path);
    let models: Vec<&str> = paths.iter().copied().filter(|path| is_model(path)).collect();
    let missing = |asked: String| {
        let there = match (closest_picks(name, &models), has("config.json")) {
            (Some(there), _) => format!("there are {there}"),
            (None, true) => format!(
                "it has no GGUF files; hf:{} without the part after the colon uses its safetensors",
                name.repo()
            ),
            (None, false) => "it has no GGUF files".into(),
        };
        Error::NoSuchFile { repo: name.repo(), asked, there }
    };
    match name.pick.as_deref() {
        Some(file) if name.picks_file() => {
            let found = paths.iter().find(|path| **path == file);
            let found = found.or_else(|| paths.iter().find(|path| path.eq_ignore_ascii_case(file)));
            let first = found.ok_or_else(|| missing(format!("file {file}")))?;
            parts(name, first, paths)
        }
        Some(quant) => match models.iter().find(|path| is_of(path, quant)) {
            Some(first) => parts(name, first, paths),
            None => Err(missing(format!("quantisation {quant}"))),
        },
        None if has("config.json") && (has(SINGLE) || has(INDEX)) => {
            let texts = TEXTS.iter().filter(|text| has(text)).map(|text| text.to_string());
            let weights = match has(SINGLE) {
                true => Weights::Single(SINGLE.into()),
                false => Weights::Index(INDEX.into()),
            };
            let index = matches!(weights, Weights::Index(_)).then(|| INDEX.to_string());
            Ok(Selection::Folder { texts: texts.chain(index).collect(), weights })
        }
        None => {
            let default = DEFAULT_QUANTS.iter().find_map(|q| models.iter().find(|path| is_of(path, q)));
            match default.or(models.first()) {
                Some(first) => parts(name, first, paths),
                None => Err(Error::NoModel { repo: name.repo(), what: nothing_of(paths) }),
            }
        }
    }
}

/// Describes what the repository has instead of a model that kvist can run.
fn nothing_of(paths: &[&str]) -> String {
    let any = |ending: &str| paths.iter().any(|path| path.ends_with(ending));
    let advice = "a repository whose name ends in -GGUF may have the same model";
    if any(".safetensors") {
        format!(
            "safetensors, but not a model for transformers (config.json with model.safetensors); {advice}"
        )
    } else if any(".bin") || any(".pt") || any(".pth") {
        format!("only PyTorch weights; kvist reads safetensors and GGUF: {advice}")
    } else if any(".onnx") {
        format!("only ONNX files; kvist reads safetensors and GGUF: {advice}")
    } else {
        "neither safetensors nor GGUF files".into()
    }
}

/// All parts of the GGUF model that contains `first`. Fails if a part is missing.
fn parts(name: &HubName, first: &str, paths: &[&str]) -> Result<Selection, Error> {
    let Some((stem, _, count)) = split(first) else { return Ok(Selection::Gguf(vec![first.into()])) };
    let parts: Vec<String> = (1..=count).map(|part| format!("{stem}-{part:05}-of-{count:05}.gguf")).collect();
    match parts.iter().find(|part| !paths.contains(&part.as_str())) {
        Some(part) => Err(Error::NoSuchFile {
            repo: name.repo(),
            asked: format!("file {part}"),
            there: format!("{first} is one of {count} parts"),
        }),
        None => Ok(Selection::Gguf(parts)),
    }
}

/// Upper bound on the number of parts; no model has more.
const MAX_PARTS: u32 = 4096;

/// Splits the name of a part: `NAME-00002-of-00003.gguf` gives `NAME`, 2 and 3.
pub(crate) fn split(path: &str) -> Option<(&str, u32, u32)> {
    let stem = path.strip_suffix(".gguf")?;
    let (rest, count) = stem.rsplit_once("-of-")?;
    let (stem, part) = rest.rsplit_once('-')?;
    let number = |text: &str| (text.len() == 5).then(|| text.parse::<u32>().ok())?;
    let (part, count) = (number(part)?, number(count)?);
    ((1..=count).contains(&part) && count <= MAX_PARTS).then_some((stem, part, count))
}

/// Returns whether the path is a GGUF model or its first part. False for later parts and for auxiliary files
/// such as mmproj and imatrix (llama.cpp's list).
pub(crate) fn is_model(path: &str) -> bool {
    const BESIDE: [&str; 6] = ["mmproj", "imatrix", "mtp-", "eagle3-", "dflash-", "dspark-"];
    let file = file_name(path).to_lowercase();
    file.ends_with(".gguf")
        && split(path).is_none_or(|(_, part, _)| part == 1)
        && !BESIDE.iter().any(|part| file.contains(part))
}

pub(crate) fn file_name(path: &str) -> &str {
    path.rsplit('/').next().unwrap_or(path)
}

/// Returns whether a file's name, or a folder in its path, contains this quantisation as a whole word.
pub(crate) fn is_of(path: &str, quant: &str) -> bool {
    let (path, quant) = (path.to_uppercase(), quant.to_uppercase());
    let ends = |c: Option<char>, marks: &str| c.is_none_or(|c| marks.contains(c));
    !quant.is_empty()
        && path.match_indices(&quant).any(|(at, _)| {
            ends(path[..at].chars().next_back(), "-./_")
                && ends(path[at + quant.len()..].chars().next(), "-./")
        })
}

/// The quantisation in a path, in upper case: `Q4_K_M` for `x-q4_k_m-00001-of-00002.gguf`.
pub fn quant(path: &str) -> Option<String> {
    let stem = split(path).map_or(path.strip_suffix(".gguf").unwrap_or(path), |(stem, ..)| stem);
    let is_quant = |part: &str| {
        let digit = |rest: &str| rest.starts_with(|c: char| c.is_ascii_digit());
        let after = |prefix: &str| part.strip_prefix(prefix).is_some_and(digit);
        ["F16", "F32", "BF16", "FP16", "FP32"].contains(&part)
            || ["Q", "IQ", "TQ", "MXFP", "NVFP"].iter().any(|prefix| after(prefix))
    };
    let mut parts: Vec<String> = stem.split(['-', '.', '/']).map(str::to_uppercase).collect();
    parts.reverse();
    parts.into_iter().find(|part| is_quant(part))
}

/// The names that can be asked for in this repository, closest match first: quantisations, or the file where two files
/// share a quantisation.
fn closest_picks(name: &HubName, models: &[&str]) -> Option<String> {
    let asked = name.pick.as_deref().unwrap_or_default();
    match name.picks_file() {
        true => closest(asked, models.iter().map(|path| path.to_string())),
        false => closest(asked, models.iter().map(|path| pick(path, models))),
    }
}

/// The shortest text that selects this file among `models`: its quantisation if that is unique, otherwise its
/// path.
pub(crate) fn pick(path: &str, models: &[&str]) -> String {
    match quant(path) {
        Some(quant) if models.iter().filter(|path| is_of(path, &quant)).count() == 1 => quant,
        _ => path.into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn name(pick: Option<&str>) -> HubName {
        HubName { owner: "a".into(), name: "b".into(), revision: None, pick: pick.map(Into::into) }
    }
    fn gguf(parts: &[&str]) -> Selection {
        Selection::Gguf(parts.iter().map(|part| part.to_string()).collect())
    }

    const MANY: [&str; 8] = [
        "README.md",
        "imatrix.gguf",
        "mmproj-model-Q4_K_M.gguf",
        "x-F16.gguf",
        "x-IQ4_XS.gguf",
        "x-Q4_K_M.gguf",
        "x-Q5_K_M-00001-of-00002.gguf",
        "x-Q5_K_M-00002-of-00002.gguf",
    ];

    #[test]
    fn a_quantisation_is_found_by_its_name() {
        for (pick, expected) in [
            (None, &["x-Q4_K_M.gguf"][..]),
            (Some("q4_k_m"), &["x-Q4_K_M.gguf"]),
            (Some("f16"), &["x-F16.gguf"]),
            (Some("IQ4_XS"), &["x-IQ4_XS.gguf"]),
            (Some("Q5_K_M"), &["x-Q5_K_M-00001-of-00002.gguf", "x-Q5_K_M-00002-of-00002.gguf"]),
            (Some("X-f16.GGUF"), &["x-F16.gguf"]),
            // Any part selects the whole model.
            (
                Some("x-Q5_K_M-00002-of-00002.gguf"),
                &["x-Q5_K_M-00001-of-00002.gguf", "x-Q5_K_M-00002-of-00002.gguf"],
            ),
        ] {
            assert_eq!(choose(&name(pick), &MANY).unwrap(), gguf(expected), "{pick:?}");
        }
        // Same order as llama.cpp: Q4_K_M, then Q8_0, then the first file.
        let choice = |paths: &[&str]| choose(&name(None), paths).unwrap();
        assert_eq!(choice(&["x-Q2_K.gguf", "x-Q8_0.gguf"]), gguf(&["x-Q8_0.gguf"]));
        assert_eq!(choice(&["mmproj-Q8_0.gguf", "x-Q2_K.gguf", "x-Q3_K_S.gguf"]), gguf(&["x-Q2_K.gguf"]));
        assert_eq!(choice(&["Q4_K_M/x.gguf", "Q8_0/x.gguf"]), gguf(&["Q4_K_M/x.gguf"]));
        assert_eq!(choice(&["llama-2.Q4_K_M.gguf"]), gguf(&["llama-2.Q4_K_M.gguf"]));
    }

    #[test]
    fn what_is_not_there_is_said_with_what_is() {
        let error = |pick: Option<&str>, paths: &[&str]| choose(&name(pick), paths).unwrap_err().to_string();
        let said = error(Some("Q4_K_S"), &MANY);
        assert!(said.contains("a/b has no quantisation Q4_K_S; there are Q4_K_M, "), "{said}");
        assert!(said.contains("IQ4_XS") && said.contains("F16") && !said.contains("mmproj"), "{said}");
        // Part of a quantisation's name does not match: `4` or `K_M` would be ambiguous.
        assert!(error(Some("4"), &MANY).contains("has no quantisation"));
        assert!(error(Some("Q4_XS"), &MANY).contains("IQ4_XS"));
        let said = error(Some("x-F61.gguf"), &MANY);
        assert!(said.contains("no file x-F61.gguf; there are x-F16.gguf, "), "{said}");
        let half = ["x-00001-of-00002.gguf"];
        assert!(error(None, &half).contains("no file x-00002-of-00002.gguf"), "{}", error(None, &half));
        let folder = ["config.json", "model.safetensors"];
        assert!(error(Some("Q8_0"), &folder).contains("uses its safetensors"));
        for (paths, expected) in [
            (&["config.json", "pytorch_model.bin"][..], "only PyTorch weights"),
            (&["onnx/model.onnx"], "ONNX"),
            (&["unet/x.safetensors"], "not a model for transformers"),
            (&["README.md"], "neither safetensors nor GGUF"),
        ] {
            assert!(error(None, paths).contains(expected), "{paths:?}: {}", error(None, paths));
        }
        // Two files with the same quantisation are told apart by their paths.
        let two = ["a/x-Q8_0.gguf", "b/x-Q8_0.gguf"];
        assert!(error(Some("F32"), &two).contains("a/x-Q8_0.gguf, b/x-Q8_0.gguf"));
    }

    #[test]
    fn a_safetensors_repository_gives_what_the_engine_reads() {
        let texts = ["config.json", "tokenizer.json", "special_tokens_map.json"];
        let single = [
            "README.md",
            "config.json",
            "model.safetensors",
            "onnx/model.onnx",
            "special_tokens_map.json",
            "tokenizer.json",
        ];
        let Selection::Folder { texts: chosen, weights } = choose(&name(None), &single).unwrap() else {
            panic!()
        };
        assert_eq!((chosen, weights), (texts.map(String::from).to_vec(), Weights::Single(SINGLE.into())));
        let sharded = ["config.json", "model-00001-of-00002.safetensors", INDEX, "x-Q8_0.gguf"];
        let Selection::Folder { texts: chosen, weights } = choose(&name(None), &sharded).unwrap() else {
            panic!()
        };
        assert_eq!(chosen, ["config.json", INDEX].map(String::from));
        assert_eq!(weights, Weights::Index(INDEX.into()));
        // A repository with both formats: a quantisation selects the GGUF file.
        assert_eq!(choose(&name(Some("Q8_0")), &sharded).unwrap(), gguf(&["x-Q8_0.gguf"]));
    }

    #[test]
    fn names_tell_quantisations() {
        for (path, expected) in [
            ("x-q4_k_m.gguf", Some("Q4_K_M")),
            ("llama-2-7b.Q5_K_S.gguf", Some("Q5_K_S")),
            ("UD-IQ2_XXS/x-UD-IQ2_XXS-00001-of-00003.gguf", Some("IQ2_XXS")),
            ("Q8_0/x-00001-of-00002.gguf", Some("Q8_0")),
            ("x-Q4_K_M-imat.gguf", Some("Q4_K_M")),
            ("gpt-oss-20b-MXFP4.gguf", Some("MXFP4")),
            ("Qwen3-0.6B-bf16.gguf", Some("BF16")),
            ("gemma-3-270m.gguf", None),
            ("Qwen-q.gguf", None),
        ] {
            assert_eq!(quant(path).as_deref(), expected, "{path}");
        }
        assert_eq!(split("x-00002-of-00003.gguf"), Some(("x", 2, 3)));
        for none in ["x-00004-of-00003.gguf", "x-2-of-3.gguf", "x-00000-of-00003.gguf", "x.gguf", "-of-.gguf"]
        {
            assert_eq!(split(none), None, "{none}");
        }
    }
}
