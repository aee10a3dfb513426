//! A model's recommended sampling parameters: `generation_config.json` in a folder, `general.sampling.*` in a GGUF
//! file.
//!
//! Interpreted as in vLLM and llama.cpp: a present value replaces kvist's default, an absent value changes nothing, and
//! `do_sample` is ignored.
use crate::error::Error;
use crate::files::read_text;
use crate::weights::Gguf;
use serde_json::Value;
use std::path::Path;

/// Sampling defaults that ship with a model.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Shipped {
    pub temperature: Option<f32>,
    /// 0 keeps all.
    pub top_k: Option<usize>,
    pub top_p: Option<f32>,
    pub min_p: Option<f32>,
    pub repetition_penalty: Option<f32>,
    /// Number of recent tokens that the repetition penalty covers.
    pub repetition_window: Option<usize>,
}

impl Shipped {
    /// Empty if the file does not exist.
    pub(crate) fn from_folder(folder: &Path) -> Result<Shipped, Error> {
        let path = folder.join("generation_config.json");
        if !path.exists() {
            return Ok(Shipped::default());
        }
        Self::from_json(&path.display().to_string(), &read_text(&path)?)
    }

    /// Parses the text of a `generation_config.json`. Errors name the file as `file`.
    pub fn from_json(file: &str, text: &str) -> Result<Shipped, Error> {
        let document: Value = serde_json::from_str(text)
            .map_err(|e| Error::Malformed { file: file.into(), what: format!("not JSON: {e}") })?;
        let number = |field: &str| match document.get(field).filter(|value| !value.is_null()) {
            None => Ok(None),
            Some(value) => value.as_f64().map(Some).ok_or_else(|| bad(file, field, &value.to_string())),
        };
        let shipped = Shipped {
            temperature: checked(file, "temperature", number("temperature")?, |x| x >= 0.0)?,
            top_k: count(file, "top_k", number("top_k")?)?,
            top_p: checked(file, "top_p", number("top_p")?, |x| x > 0.0 && x <= 1.0)?,
            min_p: checked(file, "min_p", number("min_p")?, |x| (0.0..=1.0).contains(&x))?,
            repetition_penalty: checked(file, "repetition_penalty", number("repetition_penalty")?, |x| {
                x > 0.0
            })?,
            repetition_window: None,
        };
        // In transformers the penalty covers the whole text.
        Ok(Shipped { repetition_window: shipped.repetition_penalty.map(|_| usize::MAX), ..shipped })
    }

    pub(crate) fn from_gguf(gguf: &Gguf) -> Result<Shipped, Error> {
        let (file, meta) = (gguf.file(), &gguf.metadata);
        let number = |key: &str, good: fn(f32) -> bool| {
            let key = format!("general.sampling.{key}");
            checked(file, &key, meta.number(&key)?, good)
        };
        let many = |key: &str| {
            let key = format!("general.sampling.{key}");
            count(file, &key, meta.number(&key)?)
        };
        Ok(Shipped {
            temperature: number("temp", |x| x >= 0.0)?,
            top_k: many("top_k")?,
            top_p: number("top_p", |x| x > 0.0 && x <= 1.0)?,
            min_p: number("min_p", |x| (0.0..=1.0).contains(&x))?,
            repetition_penalty: number("penalty_repeat", |x| x > 0.0)?,
            // In llama.cpp, -1 is the whole context and 0 is off.
            repetition_window: match meta.number("general.sampling.penalty_last_n")? {
                Some(n) if n < 0.0 => Some(usize::MAX),
                _ => many("penalty_last_n")?,
            },
        })
    }
}

fn bad(file: &str, field: &str, found: &str) -> Error {
    let problem = format!("is {found}, with which nothing can be sampled: correct it, or remove the field");
    Error::Config { file: file.into(), field: field.into(), problem }
}

fn checked(file: &str, field: &str, value: Option<f64>, good: fn(f32) -> bool) -> Result<Option<f32>, Error> {
    let Some(x) = value else { return Ok(None) };
    let rounded = x as f32;
    if rounded.is_finite() && good(rounded) {
        Ok(Some(rounded))
    } else {
        Err(bad(file, field, &x.to_string()))
    }
}

/// -1 and 0 keep all.
fn count(file: &str, field: &str, value: Option<f64>) -> Result<Option<usize>, Error> {
    match value {
        None => Ok(None),
        Some(x) if (-1.0..=4_294_967_295.0).contains(&x) && x.fract() == 0.0 => Ok(Some(x.max(0.0) as usize)),
        Some(x) => Err(bad(file, field, &x.to_string())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_named_is_read() {
        // From Qwen3-0.6B.
        let text = r#"{"bos_token_id": 151643, "do_sample": true, "eos_token_id": [151645, 151643],
            "pad_token_id": 151643, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "transformers_version": "4.51.0"}"#;
        let expected =
            Shipped { temperature: Some(0.6), top_k: Some(20), top_p: Some(0.95), ..Shipped::default() };
        assert_eq!(Shipped::from_json("f", text).unwrap(), expected);
        assert_eq!(Shipped::from_json("f", "{}").unwrap(), Shipped::default());
        let whole =
            Shipped::from_json("f", r#"{"repetition_penalty": 1.1, "top_k": -1, "min_p": null}"#).unwrap();
        assert_eq!((whole.repetition_penalty, whole.repetition_window), (Some(1.1), Some(usize::MAX)));
        assert_eq!((whole.top_k, whole.min_p), (Some(0), None));
    }

    #[test]
    fn what_cannot_be_is_named() {
        for (text, field) in [
            (r#"{"temperature": -1}"#, "temperature"),
            (r#"{"temperature": "hot"}"#, "temperature"),
            (r#"{"temperature": 1e300}"#, "temperature"),
            (r#"{"top_p": 0}"#, "top_p"),
            (r#"{"top_k": 0.5}"#, "top_k"),
            (r#"{"min_p": 2}"#, "min_p"),
            (r#"{"repetition_penalty": 0}"#, "repetition_penalty"),
            ("{", "not JSON"),
        ] {
            let error = Shipped::from_json("generation_config.json", text).unwrap_err().to_string();
            assert!(error.contains("generation_config.json") && error.contains(field), "{text}: {error}");
        }
    }
}
