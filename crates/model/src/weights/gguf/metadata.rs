//! Metadata of a GGUF file, with typed look-ups.
use crate::error::Error;
use std::collections::BTreeMap;

/// One metadata value.
#[derive(Clone, Debug, PartialEq)]
pub enum Value {
    Int(i128),
    Float(f64),
    Bool(bool),
    Text(String),
    Ints(Vec<i64>),
    Floats(Vec<f32>),
    Texts(Vec<String>),
}

/// Metadata with typed look-ups. Errors name the file and the key.
#[derive(Debug)]
pub struct Metadata {
    pub(super) file: String,
    pub(super) values: BTreeMap<String, Value>,
}

impl Metadata {
    pub fn get(&self, key: &str) -> Option<&Value> {
        self.values.get(key)
    }
    fn bad(&self, key: &str, problem: String) -> Error {
        Error::Config { file: self.file.clone(), field: key.into(), problem }
    }
    fn typed<'m, T>(
        &'m self,
        key: &str,
        expected: &str,
        convert: impl Fn(&'m Value) -> Option<T>,
    ) -> Result<Option<T>, Error> {
        let Some(value) = self.values.get(key) else { return Ok(None) };
        convert(value).map(Some).ok_or_else(|| {
            let mut found = format!("{value:?}");
            if let Some((end, _)) = found.char_indices().nth(60) {
                found.truncate(end);
                found.push('…');
            }
            self.bad(key, format!("is {found}; {expected} was expected"))
        })
    }
    pub fn size(&self, key: &str) -> Result<Option<usize>, Error> {
        self.typed(key, "a size", |v| match v {
            Value::Int(n) => usize::try_from(*n).ok(),
            // Some files list one size per layer; kvist supports those whose layers agree.
            Value::Ints(list) => {
                let first = *list.first()?;
                list.iter().all(|n| *n == first).then(|| usize::try_from(first).ok())?
            }
            _ => None,
        })
    }
    pub fn must_size(&self, key: &str) -> Result<usize, Error> {
        self.size(key)?.ok_or_else(|| self.bad(key, "is missing".into()))
    }
    pub fn token(&self, key: &str) -> Result<Option<u32>, Error> {
        self.typed(key, "a token id", |v| match v {
            Value::Int(n) => u32::try_from(*n).ok(),
            _ => None,
        })
    }
    pub fn number(&self, key: &str) -> Result<Option<f64>, Error> {
        self.typed(key, "a number", |v| match v {
            Value::Float(x) => Some(*x),
            Value::Int(n) => Some(*n as f64),
            _ => None,
        })
    }
    pub fn flag(&self, key: &str) -> Result<Option<bool>, Error> {
        self.typed(key, "true or false", |v| match v {
            Value::Bool(flag) => Some(*flag),
            _ => None,
        })
    }
    pub fn text(&self, key: &str) -> Result<Option<&str>, Error> {
        self.typed(key, "a string", |v| match v {
            Value::Text(text) => Some(text.as_str()),
            _ => None,
        })
    }
    pub fn must_text(&self, key: &str) -> Result<&str, Error> {
        self.text(key)?.ok_or_else(|| self.bad(key, "is missing".into()))
    }
    pub fn texts(&self, key: &str) -> Result<Option<&[String]>, Error> {
        self.typed(key, "a list of strings", |v| match v {
            Value::Texts(list) => Some(list.as_slice()),
            _ => None,
        })
    }
    pub fn ints(&self, key: &str) -> Result<Option<&[i64]>, Error> {
        self.typed(key, "a list of whole numbers", |v| match v {
            Value::Ints(list) => Some(list.as_slice()),
            _ => None,
        })
    }
    pub fn floats(&self, key: &str) -> Result<Option<&[f32]>, Error> {
        self.typed(key, "a list of numbers", |v| match v {
            Value::Floats(list) => Some(list.as_slice()),
            _ => None,
        })
    }
}
