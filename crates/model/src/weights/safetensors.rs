//! Hugging Face folders: `model.safetensors`, or the shards an index names. The format is read by the
//! `safetensors` crate, which checks headers, offsets and overlaps.
use super::Encoding;
use super::view::{Order, View};
use crate::error::Error;
use crate::ffi::Contents;
use ::safetensors::tensor::{Metadata, TensorInfo};
use ::safetensors::{Dtype, SafeTensors};
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Component, Path, PathBuf};

#[derive(Debug)]
struct Shard {
    file: String,
    contents: Contents,
    metadata: Metadata,
    /// Offset of the tensor data.
    data: usize,
}

impl Shard {
    /// The bytes that the header assigns to the tensor. `None` if they lie beyond the file.
    fn bytes(&self, info: &TensorInfo) -> Option<&[u8]> {
        let (from, until) = info.data_offsets;
        self.contents.get(self.data.checked_add(from)?..self.data.checked_add(until)?)
    }

    fn unlike_its_shape(&self, name: &str, info: &TensorInfo) -> Error {
        let what = format!("the bytes of `{name}` are not what its shape {:?} needs", info.shape);
        Error::Malformed { file: self.file.clone(), what }
    }
}

/// The tensors of a folder.
#[derive(Debug)]
pub struct Folder {
    path: String,
    shards: Vec<Shard>,
    /// Tensor name to shard.
    index: BTreeMap<String, usize>,
}

/// Shape and elements of a tensor of bytes.
pub(super) type Bytes<'f> = (&'f [usize], &'f [u8]);

const INDEX: &str = "model.safetensors.index.json";

impl Folder {
    pub fn open(folder: &Path, mmap: bool) -> Result<Self, Error> {
        let single = folder.join("model.safetensors");
        let index = folder.join(INDEX);
        let mut this =
            Folder { path: folder.display().to_string(), shards: Vec::new(), index: BTreeMap::new() };
        if single.exists() {
            this.add(&single, mmap)?;
        } else if index.exists() {
            for file in shard_names(&index)? {
                this.add(&folder.join(file), mmap)?;
            }
        } else {
            let what = "holds neither model.safetensors nor model.safetensors.index.json (other weight formats are \
                        not read)";
            return Err(Error::Malformed { file: folder.display().to_string(), what: what.into() });
        }
        Ok(this)
    }

    /// One file, embedded in the program.
    pub(super) fn of_bytes(name: &str, bytes: &'static [u8]) -> Result<Self, Error> {
        let mut this = Folder { path: name.into(), shards: Vec::new(), index: BTreeMap::new() };
        this.add_contents(name.into(), Contents::Static(bytes))?;
        Ok(this)
    }

    fn add(&mut self, path: &Path, mmap: bool) -> Result<(), Error> {
        self.add_contents(path.display().to_string(), Contents::open(path, mmap)?)
    }

    pub(super) fn was_read(&self) -> bool {
        self.shards.iter().any(|shard| shard.contents.was_read())
    }

    fn add_contents(&mut self, file: String, contents: Contents) -> Result<(), Error> {
        let malformed = |what: String| Error::Malformed { file: file.clone(), what };
        let (header, metadata) = SafeTensors::read_metadata(&contents)
            .map_err(|e| malformed(format!("is not a whole safetensors file: {e}")))?;
        // The crate keeps the last of two entries with the same name.
        let text = contents.get(size_of::<u64>()..).and_then(|rest| rest.get(..header)).unwrap_or_default();
        if let Some(name) = serde_json::from_slice::<Names>(text).ok().and_then(|names| names.twice) {
            return Err(malformed(format!("lists `{name}` twice")));
        }
        for name in metadata.tensors().keys() {
            if self.index.insert(name.clone(), self.shards.len()).is_some() {
                return Err(malformed(format!("holds the tensor `{name}`, which another shard holds too")));
            }
        }
        let data =
            header.checked_add(size_of::<u64>()).ok_or_else(|| malformed("has an invalid header".into()))?;
        self.shards.push(Shard { file, contents, metadata, data });
        Ok(())
    }

    pub(super) fn path(&self) -> &str {
        &self.path
    }

    /// A tensor of bytes, if present.
    pub(super) fn bytes(&self, name: &str) -> Result<Option<Bytes<'_>>, Error> {
        let Some(shard) = self.index.get(name).map(|shard| &self.shards[*shard]) else { return Ok(None) };
        let Some(info) = shard.metadata.info(name).filter(|info| info.dtype == Dtype::U8) else {
            return Ok(None);
        };
        let bytes = shard.bytes(info);
        let elements = info.shape.iter().try_fold(1usize, |n, size| n.checked_mul(*size));
        let fits = bytes.filter(|bytes| Some(bytes.len()) == elements);
        let bytes = fits.ok_or_else(|| shard.unlike_its_shape(name, info))?;
        Ok(Some((&info.shape, bytes)))
    }

    /// See [`Source::integers`](super::Source::integers).
    pub(super) fn integers(&self, name: &str) -> Result<Option<Vec<i64>>, Error> {
        let Some(shard) = self.index.get(name).map(|shard| &self.shards[*shard]) else { return Ok(None) };
        let Some(info) = shard.metadata.info(name) else { return Ok(None) };
        let bytes = shard.bytes(info).ok_or_else(|| shard.unlike_its_shape(name, info))?;
        let all: Vec<i64> = match info.dtype {
            Dtype::I64 => bytes.as_chunks().0.iter().map(|x| i64::from_le_bytes(*x)).collect(),
            Dtype::I32 => bytes.as_chunks().0.iter().map(|x| i32::from_le_bytes(*x).into()).collect(),
            other => {
                let (file, name, found) = (shard.file.clone(), name.into(), format!("{other:?}"));
                return Err(Error::TensorEncoding { file, name, found, known: "i64 and i32 here".into() });
            }
        };
        match info.shape[..] == [all.len()] {
            true => Ok(Some(all)),
            false => Err(shard.unlike_its_shape(name, info)),
        }
    }

    pub fn find(&self, name: &str) -> Result<View<'_>, Error> {
        match self.entry(name)? {
            entry if entry.info.dtype == Dtype::I8 => self.int8(entry),
            entry => entry.floats(),
        }
    }

    fn entry(&self, name: &str) -> Result<Entry<'_>, Error> {
        let missing = || Error::MissingTensor { file: self.path.clone(), name: name.into() };
        // In a multimodal checkpoint the names of the text model have a prefix, at one of two places.
        let inside = format!("language_model.{name}");
        let behind = name.strip_prefix("model.").map(|rest| format!("model.language_model.{rest}"));
        let names = [Some(name), Some(&inside), behind.as_deref()];
        let found = names.into_iter().flatten().find_map(|name| self.index.get_key_value(name));
        let (name, shard) = found.ok_or_else(missing)?;
        let shard = &self.shards[*shard];
        Ok(Entry { name, shard, info: shard.metadata.info(name).ok_or_else(missing)? })
    }

    /// Signed bytes of `compressed-tensors`, with a scale per row, or one for all, in the tensor `…weight_scale`.
    fn int8<'f>(&'f self, Entry { name, shard, info }: Entry<'f>) -> Result<View<'f>, Error> {
        let malformed = |what: String| Error::Malformed { file: shard.file.clone(), what };
        // Some writers add zero points of 0.
        let zero =
            self.entry(&format!("{name}_zero_point")).ok().and_then(|zero| zero.shard.bytes(zero.info));
        if zero.is_some_and(|bytes| bytes.iter().any(|byte| *byte != 0)) {
            let what = format!("`{name}` has zero points; kvist reads symmetric int8 weights");
            return Err(malformed(what));
        }
        let of_scales = format!("{name}_scale");
        let scales = match self.entry(&of_scales) {
            Err(Error::MissingTensor { .. }) => {
                let what = format!("`{name}` is stored as I8, but there are no scales (`{of_scales}`)");
                return Err(malformed(what));
            }
            found => found?.floats()?,
        };
        let (row, rows) = info.shape.split_last().unwrap_or((&1, &[]));
        if !row.is_multiple_of(32) {
            let what = format!("`{name}` has rows of {row}; kvist reads int8 in rows of a multiple of 32");
            return Err(malformed(what));
        }
        let rows = rows.iter().try_fold(1usize, |n, size| n.checked_mul(*size));
        let bytes = shard.bytes(info).filter(|bytes| !bytes.is_empty());
        let bytes = bytes.filter(|bytes| rows.and_then(|rows| rows.checked_mul(*row)) == Some(bytes.len()));
        let (bytes, rows) = bytes.zip(rows).ok_or_else(|| shard.unlike_its_shape(name, info))?;
        if ![rows, 1].contains(&scales.shape.iter().product()) {
            let (file, found) = (shard.file.clone(), scales.shape);
            return Err(Error::TensorShape { file, name: of_scales, found, expected: vec![rows, 1] });
        }
        let order = Order::RowScaled { scales: scales.bytes(), encoding: scales.encoding };
        Ok(View::ordered_by(name, info.shape.clone(), Encoding::Int8, bytes, order))
    }
}

/// A tensor in the headers.
#[derive(Clone, Copy)]
struct Entry<'f> {
    name: &'f str,
    shard: &'f Shard,
    info: &'f TensorInfo,
}

impl<'f> Entry<'f> {
    fn floats(self) -> Result<View<'f>, Error> {
        let Entry { name, shard, info } = self;
        let encoding = match info.dtype {
            Dtype::F32 => Encoding::F32,
            Dtype::F16 => Encoding::F16,
            Dtype::BF16 => Encoding::BF16,
            other => {
                return Err(Error::TensorEncoding {
                    file: shard.file.clone(),
                    name: name.into(),
                    found: format!("{other:?}"),
                    known: "f32, f16, bf16, and int8 with scales".into(),
                });
            }
        };
        let view = shard.bytes(info).and_then(|bytes| View::new(name, info.shape.clone(), encoding, bytes));
        view.ok_or_else(|| shard.unlike_its_shape(name, info))
    }
}

/// The keys of a header.
struct Names {
    /// A key that occurs twice.
    twice: Option<String>,
}

impl<'de> serde::Deserialize<'de> for Names {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(NamesVisitor)
    }
}

struct NamesVisitor;

impl<'de> serde::de::Visitor<'de> for NamesVisitor {
    type Value = Names;

    fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("an object")
    }
    fn visit_map<A: serde::de::MapAccess<'de>>(self, mut map: A) -> Result<Names, A::Error> {
        let (mut seen, mut twice) = (BTreeSet::new(), None);
        while let Some((name, _)) = map.next_entry::<String, serde::de::IgnoredAny>()? {
            if seen.contains(&name) {
                twice = Some(name);
            } else {
                seen.insert(name);
            }
        }
        Ok(Names { twice })
    }
}

/// The files an index names, each once. They are in the same folder; names that leave the folder are refused.
fn shard_names(index: &Path) -> Result<Vec<PathBuf>, Error> {
    let file = index.display().to_string();
    let malformed = |what: String| Error::Malformed { file: file.clone(), what };
    let text = crate::files::read_text(index)?;
    let json: serde_json::Value =
        serde_json::from_str(&text).map_err(|e| malformed(format!("is not JSON: {e}")))?;
    let map = json.get("weight_map").and_then(|m| m.as_object());
    let map = map.ok_or_else(|| malformed("has no `weight_map` object".into()))?;
    let mut names: Vec<PathBuf> = Vec::new();
    for (tensor, shard) in map {
        let name = shard.as_str().ok_or_else(|| malformed(format!("`{tensor}` names no file")))?;
        let mut parts = Path::new(name).components();
        if !matches!((parts.next(), parts.next()), (Some(Component::Normal(_)), None)) {
            return Err(malformed(format!("`{tensor}` lies in `{name}`, outside this folder")));
        }
        let name = PathBuf::from(name);
        if !names.contains(&name) {
            names.push(name);
        }
    }
    if names.is_empty() { Err(malformed("names no shard".into())) } else { Ok(names) }
}
