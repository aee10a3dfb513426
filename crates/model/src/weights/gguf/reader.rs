//! Reads the parts of a GGUF header. Every count and length is checked against the rest of the file before it is used.
use super::{Encoding, Value};
use crate::error::Error;

/// Upper bound on the length of names and keys.
const MAX_NAME: usize = 64 << 10;
const MAX_DIMS: u32 = 4;

/// Walks the header; never reads past the end.
pub(super) struct Reader<'f> {
    pub file: &'f str,
    pub bytes: &'f [u8],
    pub at: usize,
}

impl<'f> Reader<'f> {
    pub fn bad(&self, what: String) -> Error {
        Error::Malformed { file: self.file.into(), what }
    }
    pub fn left(&self) -> usize {
        self.bytes.len() - self.at
    }
    pub fn take(&mut self, n: usize, what: &str) -> Result<&'f [u8], Error> {
        if n > self.left() {
            let (at, left) = (self.at, self.left());
            return Err(self.bad(format!("ends inside {what}: {n} bytes wanted at {at}, {left} are left")));
        }
        let bytes = &self.bytes[self.at..self.at + n];
        self.at += n;
        Ok(bytes)
    }
    pub fn array<const N: usize>(&mut self, what: &str) -> Result<[u8; N], Error> {
        let mut bytes = [0; N];
        bytes.copy_from_slice(self.take(N, what)?);
        Ok(bytes)
    }
    pub fn u32(&mut self, what: &str) -> Result<u32, Error> {
        Ok(u32::from_le_bytes(self.array(what)?))
    }
    pub fn u64(&mut self, what: &str) -> Result<u64, Error> {
        Ok(u64::from_le_bytes(self.array(what)?))
    }
    /// Reads a count of items of at least `bytes_each`. They must fit into the rest of the file.
    pub fn count(&mut self, what: &str, bytes_each: usize) -> Result<usize, Error> {
        let n = self.u64(what)?;
        let max = self.left() / bytes_each;
        match usize::try_from(n) {
            Ok(n) if n <= max => Ok(n),
            _ => {
                Err(self.bad(format!("claims {n} for {what}; what is left of the file holds at most {max}")))
            }
        }
    }
    pub fn text(&mut self, what: &str) -> Result<String, Error> {
        let len = self.count(what, 1)?;
        let bytes = self.take(len, what)?;
        String::from_utf8(bytes.to_vec()).map_err(|_| self.bad(format!("holds {what} that is not UTF-8")))
    }
    pub fn name(&mut self, what: &str) -> Result<String, Error> {
        let name = self.text(what)?;
        if name.len() > MAX_NAME {
            return Err(self.bad(format!("holds {what} of {} bytes", name.len())));
        }
        Ok(name)
    }

    pub fn value(&mut self, key: &str) -> Result<Value, Error> {
        let kind = self.u32("a value type")?;
        match kind {
            8 => self.text(key).map(Value::Text),
            9 => self.list(key),
            _ => self.scalar(kind, key),
        }
    }

    pub fn scalar(&mut self, kind: u32, key: &str) -> Result<Value, Error> {
        Ok(match kind {
            0 => Value::Int(u8::from_le_bytes(self.array(key)?).into()),
            1 => Value::Int(i8::from_le_bytes(self.array(key)?).into()),
            2 => Value::Int(u16::from_le_bytes(self.array(key)?).into()),
            3 => Value::Int(i16::from_le_bytes(self.array(key)?).into()),
            4 => Value::Int(u32::from_le_bytes(self.array(key)?).into()),
            5 => Value::Int(i32::from_le_bytes(self.array(key)?).into()),
            6 => Value::Float(f32::from_le_bytes(self.array(key)?).into()),
            7 => match self.array(key)? {
                [0] => Value::Bool(false),
                [1] => Value::Bool(true),
                [other] => return Err(self.bad(format!("gives `{key}` the boolean value {other}"))),
            },
            10 => Value::Int(u64::from_le_bytes(self.array(key)?).into()),
            11 => Value::Int(i64::from_le_bytes(self.array(key)?).into()),
            12 => Value::Float(f64::from_le_bytes(self.array(key)?)),
            other => return Err(self.bad(format!("gives `{key}` the unknown type {other}"))),
        })
    }

    pub fn list(&mut self, key: &str) -> Result<Value, Error> {
        let kind = self.u32("a list's type")?;
        let bytes_each = match kind {
            0 | 1 | 7 => 1,
            2 | 3 => 2,
            4..=6 => 4,
            8 | 10..=12 => 8,
            other => {
                return Err(
                    self.bad(format!("makes `{key}` a list of type {other}, which kvist does not read"))
                );
            }
        };
        let n = self.count(key, bytes_each)?;
        match kind {
            8 => (0..n).map(|_| self.text(key)).collect::<Result<_, _>>().map(Value::Texts),
            6 | 12 => {
                let mut list = Vec::new();
                for _ in 0..n {
                    if let Value::Float(x) = self.scalar(kind, key)? {
                        list.push(x as f32);
                    }
                }
                Ok(Value::Floats(list))
            }
            _ => {
                let mut list = Vec::new();
                for _ in 0..n {
                    let value = match self.scalar(kind, key)? {
                        Value::Int(n) => i64::try_from(n).ok(),
                        Value::Bool(flag) => Some(flag.into()),
                        _ => None,
                    };
                    list.push(
                        value.ok_or_else(|| {
                            self.bad(format!("lists a number in `{key}` that is too large"))
                        })?,
                    );
                }
                Ok(Value::Ints(list))
            }
        }
    }

    #[allow(clippy::type_complexity)]
    pub fn tensor_info(&mut self) -> Result<(String, Vec<usize>, Result<Encoding, String>, u64), Error> {
        let name = self.name("a tensor name")?;
        let n_dims = self.u32("a tensor's dimensions")?;
        if n_dims == 0 || n_dims > MAX_DIMS {
            return Err(
                self.bad(format!("gives `{name}` {n_dims} dimensions; 1 to {MAX_DIMS} were expected"))
            );
        }
        let mut shape = Vec::new();
        for _ in 0..n_dims {
            let n = self.u64("a tensor's shape")?;
            let n = usize::try_from(n).ok().filter(|n| *n > 0);
            shape.push(n.ok_or_else(|| self.bad(format!("gives `{name}` an impossible shape")))?);
        }
        shape.reverse();
        let number = self.u32("a tensor's type")?;
        let encoding = Encoding::of_ggml(number).ok_or_else(|| ggml_type_name(number));
        let offset = self.u64("a tensor's offset")?;
        Ok((name, shape, encoding, offset))
    }
}

/// ggml's name of a type that kvist does not support.
fn ggml_type_name(kind: u32) -> String {
    let name = match kind {
        24..=27 => "whole numbers",
        42 => "q2_0",
        _ => return format!("ggml type {kind}"),
    };
    name.into()
}
