//! The file of a session: safetensors, with a header of its own in the metadata.
use super::copy::{Rows, SideSpec, sides};
use super::recent::recent_sides;
use super::{Origin, SavedMessage, SavedText};
use kvist_cache::GroupId;
use kvist_device::{DType, Layout, Storage};
use kvist_model::{Error, Fingerprint, hash};
use safetensors::tensor::{Dtype, SafeTensors, TensorView};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use std::borrow::Cow;
use std::collections::{BTreeMap, HashMap};
use std::fs::{File, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

const FORMAT: FileFormat = FileFormat {
    format: "kvist-session",
    version: 1,
    noun: "session",
    advice: "`kvist run --save-session` writes one",
    changed: "the file is torn or has changed since it was saved",
};
/// Keys of the metadata: the header as JSON, and its hash.
pub(crate) const HEADER: &str = "kvist";
pub(crate) const HEADER_HASH: &str = "blake3";

/// A format of ours inside safetensors, and the words for its errors.
pub(crate) struct FileFormat {
    pub format: &'static str,
    pub version: u32,
    pub noun: &'static str,
    pub advice: &'static str,
    pub changed: &'static str,
}

impl FileFormat {
    /// The file is of something else.
    pub fn none(&self, file: &str) -> Error {
        self.bad(file, format!("no {} of kvist: {}", self.noun, self.advice))
    }
    /// The file is not as it was written.
    pub fn broken(&self, file: &str, what: &str) -> Error {
        self.bad(file, format!("{what}: {}", self.changed))
    }
    fn bad(&self, file: &str, what: String) -> Error {
        Error::Malformed { file: file.into(), what }
    }

    /// The header of a file, after its hash, its format and its version were compared.
    pub fn header<H: DeserializeOwned>(
        &self,
        file: &str,
        metadata: &Option<HashMap<String, String>>,
    ) -> Result<H, Error> {
        let none = || self.none(file);
        let entries = metadata.as_ref().ok_or_else(none)?;
        let (text, expected) = entries.get(HEADER).zip(entries.get(HEADER_HASH)).ok_or_else(none)?;
        if hash(&[text.as_bytes()]) != *expected {
            return Err(self.broken(file, "the header's hash is another one"));
        }
        let value = serde_json::from_str::<serde_json::Value>(text).map_err(|_| none())?;
        if value.get("format").and_then(|format| format.as_str()) != Some(self.format) {
            return Err(none());
        }
        match value.get("version").and_then(|version| version.as_u64()) {
            Some(version) if version > u64::from(self.version) => {
                let (noun, reads) = (self.noun, self.version);
                let what =
                    format!("a {noun} of format {version}, and this kvist reads {reads}: use a newer kvist");
                Err(self.bad(file, what))
            }
            _ => {
                serde_json::from_value(value).map_err(|error| self.bad(file, format!("its header: {error}")))
            }
        }
    }
}

#[derive(Debug, Serialize, Deserialize)]
struct Header {
    format: String,
    version: u32,
    origin: Origin,
    /// The kind of cache that it was saved from, for people: it is resumed in any other. Older files do not say it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    kind: Option<String>,
    /// Positions whose K and V were in the cache.
    stored: u32,
    messages: Vec<SavedMessage>,
    /// The BLAKE3 hash of every tensor's bytes.
    blake3: BTreeMap<String, String>,
}

pub(crate) fn side_name(side: &SideSpec) -> String {
    format!("layer.{}.{}", side.layer, if side.keys { "k" } else { "v" })
}

/// The f16 rows of the newest tokens, which files of packed storages have.
pub(crate) fn recent_name(side: &SideSpec) -> String {
    format!("{}.recent", side_name(side))
}
pub(crate) fn recent_positions_name(group: usize) -> String {
    format!("group.{group}.recent")
}

pub(crate) fn positions_name(group: usize) -> String {
    format!("group.{group}.positions")
}

/// Floats are readable as such; packed rows are bytes.
pub(crate) fn tensor_type(storage: Storage, side: &SideSpec) -> (Dtype, usize) {
    match storage.dtype {
        DType::F32 => (Dtype::F32, side.dim as usize),
        DType::F16 => (Dtype::F16, side.dim as usize),
        DType::BF16 => (Dtype::BF16, side.dim as usize),
        DType::Q8 | DType::Q4 | DType::T4 => (Dtype::U8, side.row_bytes),
    }
}

pub(crate) fn le_bytes(words: &[u32]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_le_bytes()).collect()
}

/// A tensor to write: name, type, shape, bytes.
type Named<'a> = (String, Dtype, Vec<usize>, Cow<'a, [u8]>);

/// Writes a session, of a cache of this kind with so many positions. See [`save`](super::save).
pub fn write(
    path: &Path,
    text: SavedText<'_>,
    (kind, stored): (&str, u32),
    origin: &Origin,
    layout: &Layout,
    (k, v): (Storage, Storage),
    (groups, recent): (&[Rows], &[Rows]),
) -> Result<(), Error> {
    let mut tensors: Vec<Named<'_>> = Vec::new();
    tensors.push(("tokens".into(), Dtype::U32, vec![text.tokens.len()], le_bytes(text.tokens).into()));
    for (g, rows) in groups.iter().enumerate() {
        let n = rows.positions.len();
        tensors.push((positions_name(g), Dtype::U32, vec![n], le_bytes(&rows.positions).into()));
        for (side, bytes) in sides(layout, (k, v), GroupId(g as u16)).iter().zip(&rows.sides) {
            let (dtype, row) = tensor_type(if side.keys { k } else { v }, side);
            tensors.push((side_name(side), dtype, vec![n, side.heads as usize, row], bytes.into()));
        }
    }
    for (g, rows) in recent.iter().enumerate().filter(|(_, rows)| !rows.positions.is_empty()) {
        let n = rows.positions.len();
        tensors.push((recent_positions_name(g), Dtype::U32, vec![n], le_bytes(&rows.positions).into()));
        for (side, bytes) in recent_sides(layout, (k, v), GroupId(g as u16)).iter().zip(&rows.sides) {
            let shape = vec![n, side.heads as usize, side.dim as usize];
            tensors.push((recent_name(side), Dtype::F16, shape, bytes.into()));
        }
    }
    let header = Header {
        format: FORMAT.format.into(),
        version: FORMAT.version,
        origin: origin.clone(),
        kind: Some(kind.into()),
        stored,
        messages: text.messages.to_vec(),
        blake3: tensors.iter().map(|(name, _, _, bytes)| (name.clone(), hash(&[bytes]))).collect(),
    };
    let bad = |what: String| Error::Malformed { file: path.display().to_string(), what };
    let header = serde_json::to_string(&header).map_err(|error| bad(error.to_string()))?;
    let metadata =
        HashMap::from([(HEADER_HASH.into(), hash(&[header.as_bytes()])), (HEADER.to_string(), header)]);
    let views: Result<Vec<_>, _> = tensors
        .iter()
        .map(|(name, dtype, shape, bytes)| {
            Ok((name.as_str(), TensorView::new(*dtype, shape.clone(), bytes)?))
        })
        .collect();
    let views = views.map_err(|error: safetensors::SafeTensorError| bad(error.to_string()))?;
    let bytes = safetensors::serialize(views, Some(metadata)).map_err(|error| bad(error.to_string()))?;
    replace(path, |file| file.write_all(&bytes))
        .map_err(|source| Error::Write { path: path.to_path_buf(), source })
}

/// Writes a file as a whole or not at all. A new one is readable by its owner alone; one that is there keeps its mode. A link
/// stays, and what it points to is replaced.
pub(crate) fn replace(
    path: &Path,
    write: impl FnOnce(&mut File) -> std::io::Result<()>,
) -> std::io::Result<()> {
    let found = std::fs::metadata(path).ok();
    if found.as_ref().is_some_and(|found| !found.is_file()) {
        return Err(std::io::Error::other("it is there, and is no regular file"));
    }
    let path = if found.is_some() { std::fs::canonicalize(path)? } else { path.to_path_buf() };
    let name = path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    // Another thread may write the same file at the same time: then one of both is there in the end, and whole.
    static WRITES: AtomicU64 = AtomicU64::new(0);
    let (process, write_id) = (std::process::id(), WRITES.fetch_add(1, Ordering::Relaxed));
    let partial = folder.join(format!(".{name}.{process}.{write_id}.partial"));
    let all = || {
        let mut options = OpenOptions::new();
        options.write(true).create(true).truncate(true);
        #[cfg(unix)]
        std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
        let mut file = options.open(&partial)?;
        if let Some(found) = &found {
            file.set_permissions(found.permissions())?;
        }
        write(&mut file)?;
        file.sync_all()?;
        std::fs::rename(&partial, &path)?;
        // The name is on disk only when the folder is; not every system can sync one.
        if let Ok(folder) = File::open(folder) {
            let _ = folder.sync_all();
        }
        Ok(())
    };
    all().inspect_err(|_| {
        let _ = std::fs::remove_file(&partial);
    })
}

/// A session that was read from a file, and whose bytes are those that were written.
#[derive(Debug)]
pub struct SavedSession {
    path: PathBuf,
    bytes: Vec<u8>,
    header: Header,
    tokens: Vec<u32>,
}

impl SavedSession {
    /// Reads a file and compares every hash.
    ///
    /// # Errors
    /// The file cannot be read, is no session, was written by a newer version, is torn or has changed.
    pub fn open(path: &Path) -> Result<Self, Error> {
        let bytes = std::fs::read(path).map_err(|source| Error::Read { path: path.to_path_buf(), source })?;
        if bytes.is_empty() {
            return Err(Error::Empty { path: path.to_path_buf() });
        }
        let file = path.display().to_string();
        let broken = |what: &str| FORMAT.broken(&file, what);
        let (_, metadata) = SafeTensors::read_metadata(&bytes).map_err(|_| FORMAT.none(&file))?;
        let header: Header = FORMAT.header(&file, metadata.metadata())?;
        let tensors = SafeTensors::deserialize(&bytes).map_err(|error| broken(&error.to_string()))?;
        if tensors.len() != header.blake3.len() {
            return Err(broken("it has other tensors than its header says"));
        }
        for (name, expected) in &header.blake3 {
            let tensor = tensors.tensor(name).map_err(|_| broken(&format!("it lacks `{name}`")))?;
            if hash(&[tensor.data()]) != *expected {
                return Err(broken(&format!("the hash of `{name}` is another one")));
            }
        }
        let tokens = words(&tensors, "tokens").ok_or_else(|| broken("it has no tokens"))?;
        if (tokens.len() as u64) < u64::from(header.stored) || tokens.is_empty() {
            return Err(broken("it has fewer tokens than positions"));
        }
        Ok(SavedSession { path: path.to_path_buf(), header, tokens, bytes })
    }

    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }
    /// Positions whose K and V were in the cache: the first so many tokens.
    pub fn stored(&self) -> u32 {
        self.header.stored
    }
    /// The kind of cache that it was saved from; `None` in files of older versions. It may be resumed in any other.
    pub fn kind(&self) -> Option<&str> {
        self.header.kind.as_deref()
    }
    pub fn messages(&self) -> &[SavedMessage] {
        &self.header.messages
    }
    pub fn origin(&self) -> &Origin {
        &self.header.origin
    }

    /// Compares the models alone.
    ///
    /// # Errors
    /// Names the first difference.
    pub fn check_model(&self, now: &Fingerprint) -> Result<(), Error> {
        self.header.origin.check_model(&self.path.display().to_string(), now)
    }

    /// Compares what the session depends on with what is used now.
    ///
    /// # Errors
    /// Names the first difference.
    pub fn check(&self, now: &Origin) -> Result<(), Error> {
        self.header.origin.check(&self.path.display().to_string(), now)
    }

    /// The rows of every layer group. The origin has been checked.
    pub(super) fn rows(&self, layout: &Layout, storages: (Storage, Storage)) -> Result<Vec<Rows>, Error> {
        let tensors = self.tensors()?;
        let group = |g: usize| {
            let sides = sides(layout, storages, GroupId(g as u16));
            self.rows_of(&tensors, &positions_name(g), &sides, side_name)
        };
        (0..layout.n_groups()).map(group).collect()
    }

    /// The f16 rows of the newest tokens of every layer group: none if the storages are floats, the cache had dropped them, or an
    /// older version of kvist wrote the file. The origin has been checked.
    pub(super) fn recent_rows(
        &self,
        layout: &Layout,
        storages: (Storage, Storage),
    ) -> Result<Vec<Rows>, Error> {
        let tensors = self.tensors()?;
        let group = |g: usize| {
            let name = recent_positions_name(g);
            if tensors.tensor(&name).is_err() {
                return Ok(Rows::default());
            }
            let sides = recent_sides(layout, storages, GroupId(g as u16));
            self.rows_of(&tensors, &name, &sides, recent_name)
        };
        (0..layout.n_groups()).map(group).collect()
    }

    fn misfit(&self) -> Error {
        let what = "its tensors do not fit the model".into();
        Error::Malformed { file: self.path.display().to_string(), what }
    }

    fn tensors(&self) -> Result<SafeTensors<'_>, Error> {
        SafeTensors::deserialize(&self.bytes).map_err(|_| self.misfit())
    }

    /// The positions in the tensor `positions`, and the rows of each side at these positions.
    fn rows_of(
        &self,
        tensors: &SafeTensors<'_>,
        positions: &str,
        sides: &[SideSpec],
        name: impl Fn(&SideSpec) -> String,
    ) -> Result<Rows, Error> {
        let bad = || self.misfit();
        let positions = words(tensors, positions).ok_or_else(bad)?;
        let ascending = positions.is_sorted_by(|a, b| a < b);
        if !ascending || positions.last().is_some_and(|last| *last >= self.header.stored) {
            return Err(bad());
        }
        let side = |side: &SideSpec| {
            let bytes = tensors.tensor(&name(side)).map_err(|_| bad())?.data();
            let fits = bytes.len() == positions.len() * side.width();
            fits.then(|| bytes.to_vec()).ok_or_else(bad)
        };
        Ok(Rows { sides: sides.iter().map(side).collect::<Result<_, Error>>()?, positions })
    }
}

/// A tensor of u32.
fn words(tensors: &SafeTensors<'_>, name: &str) -> Option<Vec<u32>> {
    let tensor = tensors.tensor(name).ok().filter(|tensor| tensor.dtype() == Dtype::U32)?;
    words_of(tensor.data())
}

/// The words in these bytes; `None` if bytes are left over.
pub(crate) fn words_of(bytes: &[u8]) -> Option<Vec<u32>> {
    let (words, []) = bytes.as_chunks::<4>() else { return None };
    Some(words.iter().map(|word| u32::from_le_bytes(*word)).collect())
}
