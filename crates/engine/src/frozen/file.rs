//! The file of a frozen prefix: safetensors, whose first tensors are images of pools and begin at a page.
use super::{BLOCK, FrozenText, memory};
use crate::saved::{
    FileFormat, HEADER, HEADER_HASH, Origin, Rows, SideSpec, le_bytes, positions_name, recent_name,
    recent_positions_name, replace, side_name, tensor_type, words_of,
};
use kvist_device::{Image, MappedRows, MappedSide, Reservation, Side, Storage};
use kvist_model::{Error, Fingerprint, hash};
use safetensors::tensor::{Dtype, Metadata};
use serde::{Deserialize, Serialize};
use serde_json::json;
use std::borrow::Cow;
use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::io::{Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

const FORMAT: FileFormat = FileFormat {
    format: "kvist-prefix",
    version: 1,
    noun: "prefix",
    advice: "`kvist prefix freeze` writes one",
    changed: "the file is torn or has changed since it was frozen",
};
/// [`Header::layout`] of a file without images, from a device that does not attend files in place.
const NO_IMAGES: &str = "rows";
/// The tensors begin at a multiple of this, so that a map of the file has them at pages.
const PAGE: u64 = 4096;
/// The longest JSON that readers of safetensors take.
const LONGEST_HEADER: u64 = 100_000_000;

#[derive(Debug, Serialize, Deserialize)]
struct Header {
    format: String,
    version: u32,
    origin: Origin,
    /// What computed it. Files of older versions do not say so.
    #[serde(default)]
    maker: String,
    /// The layout of images, or [`NO_IMAGES`].
    layout: String,
    /// Positions whose K and V are here: all tokens.
    stored: u32,
    system: Option<String>,
    /// Images with a value that is not finite.
    not_finite: Vec<String>,
    /// The BLAKE3 hash of every tensor's bytes.
    blake3: BTreeMap<String, String>,
}

fn image_name(side: MappedSide) -> String {
    let half = match side.side {
        Side::K => "k",
        Side::V => "v",
    };
    format!("layer.{}.{half}.image", side.layer.0)
}

/// Whether a tensor has K or V of a layer: [`side_name`].
fn is_rows(name: &str) -> bool {
    name.starts_with("layer.") && (name.ends_with(".k") || name.ends_with(".v"))
}

/// A tensor to write.
struct Named {
    name: String,
    dtype: &'static str,
    shape: Vec<usize>,
    bytes: Vec<u8>,
}

/// Collects the parts of a file.
pub(super) struct Writer {
    header: Header,
    images: Vec<Named>,
    words: Vec<Named>,
    rows: Vec<Named>,
}

impl Writer {
    /// `layout`: that of the images; `None` if there are none.
    pub fn new(
        text: FrozenText<'_>,
        stored: u32,
        (origin, maker): (&Origin, String),
        layout: Option<&str>,
    ) -> Self {
        let header = Header {
            format: FORMAT.format.into(),
            version: FORMAT.version,
            origin: origin.clone(),
            maker,
            layout: layout.unwrap_or(NO_IMAGES).into(),
            stored,
            system: text.system.map(str::to_string),
            not_finite: Vec::new(),
            blake3: BTreeMap::new(),
        };
        let mut this = Writer { header, images: Vec::new(), words: Vec::new(), rows: Vec::new() };
        this.word("tokens".into(), text.tokens);
        this
    }

    fn word(&mut self, name: String, words: &[u32]) {
        let bytes = le_bytes(words);
        self.words.push(Named { name, dtype: "U32", shape: vec![words.len()], bytes });
    }

    /// Adds K or V of a layer that is to be mapped.
    pub fn image(&mut self, side: MappedSide, image: Image) {
        let (name, mut bytes) = (image_name(side), image.bytes);
        if !image.finite {
            self.header.not_finite.push(name.clone());
        }
        // The next one begins at a cache line.
        bytes.resize(bytes.len().next_multiple_of(MappedRows::ALIGNMENT as usize), 0);
        self.images.push(Named { name, dtype: "U8", shape: vec![bytes.len()], bytes });
    }

    /// Adds the rows of a group that is to be copied.
    pub fn rows(&mut self, group: usize, sides: &[SideSpec], (k, v): (Storage, Storage), rows: Rows) {
        self.word(positions_name(group), &rows.positions);
        let n = rows.positions.len();
        for (side, bytes) in sides.iter().zip(rows.sides) {
            let (dtype, row) = tensor_type(if side.keys { k } else { v }, side);
            let dtype = match dtype {
                Dtype::F32 => "F32",
                Dtype::F16 => "F16",
                Dtype::BF16 => "BF16",
                _ => "U8",
            };
            let shape = vec![n, side.heads as usize, row];
            self.rows.push(Named { name: side_name(side), dtype, shape, bytes });
        }
    }

    /// Adds the f16 rows of the newest tokens of a group, if it has any.
    pub fn recent(&mut self, group: usize, sides: &[SideSpec], rows: Rows) {
        if rows.positions.is_empty() {
            return;
        }
        self.word(recent_positions_name(group), &rows.positions);
        let n = rows.positions.len();
        for (side, bytes) in sides.iter().zip(rows.sides) {
            let shape = vec![n, side.heads as usize, side.dim as usize];
            self.rows.push(Named { name: recent_name(side), dtype: "F16", shape, bytes });
        }
    }

    /// Writes a temporary file beside `path`, syncs and renames it.
    pub fn write(self, path: &Path) -> Result<(), Error> {
        let whole = self.whole(path)?;
        replace(path, |file| whole.write_to(file))
            .map_err(|source| Error::Write { path: path.to_path_buf(), source })
    }

    /// Writes a file in memory, which errors call `name`, and opens it. `room` shrinks to what the prefix takes.
    pub fn into_memory(self, name: &str, mut room: Reservation) -> Result<FrozenPrefix, Error> {
        let path = Path::new(name);
        let beside: usize = self.words.iter().chain(&self.rows).map(|tensor| tensor.bytes.len()).sum();
        let whole = self.whole(path)?;
        let bytes = whole.len().next_multiple_of(PAGE) + beside as u64;
        room.grow(bytes.saturating_sub(room.bytes()))?;
        room.shrink(room.bytes() - bytes);
        let write = || {
            let mut file = memory::create(name)?;
            whole.write_to(&mut file)?;
            memory::seal(&file)?;
            Ok(file)
        };
        let file = write().map_err(|source| Error::Write { path: path.to_path_buf(), source })?;
        FrozenPrefix::of(file, path, Some(Arc::new(room)))
    }

    fn whole(self, path: &Path) -> Result<Whole, Error> {
        let bad = |what: String| Error::Malformed { file: path.display().to_string(), what };
        let Writer { mut header, images, words, rows } = self;
        let tensors: Vec<Named> = images.into_iter().chain(words).chain(rows).collect();
        header.blake3 = tensors.iter().map(|it| (it.name.clone(), hash(&[&it.bytes]))).collect();
        let header = serde_json::to_string(&header).map_err(|error| bad(error.to_string()))?;
        let mut json = serde_json::Map::new();
        json.insert(
            "__metadata__".into(),
            json!({ HEADER: header, HEADER_HASH: hash(&[header.as_bytes()]) }),
        );
        let mut end = 0;
        for Named { name, dtype, shape, bytes } in &tensors {
            let offsets = [end, end + bytes.len()];
            json.insert(name.clone(), json!({ "dtype": dtype, "shape": shape, "data_offsets": offsets }));
            end = offsets[1];
        }
        let mut json = serde_json::to_vec(&json).map_err(|error| bad(error.to_string()))?;
        let begin = (json.len() as u64 + 8).next_multiple_of(PAGE);
        json.resize(begin as usize - 8, b' '); // readers skip spaces
        Ok(Whole { json, tensors })
    }
}

/// All that a file consists of: its JSON, padded so that the tensors begin at a page.
struct Whole {
    json: Vec<u8>,
    tensors: Vec<Named>,
}

impl Whole {
    fn len(&self) -> u64 {
        let tensors: usize = self.tensors.iter().map(|tensor| tensor.bytes.len()).sum();
        (8 + self.json.len() + tensors) as u64
    }

    /// Frees every tensor as soon as it is written: a file in memory takes its place.
    fn write_to(self, file: &mut File) -> std::io::Result<()> {
        file.write_all(&(self.json.len() as u64).to_le_bytes())?;
        file.write_all(&self.json)?;
        self.tensors.into_iter().try_for_each(|tensor| file.write_all(&tensor.bytes))
    }
}

/// A tensor's place in the file.
#[derive(Clone, Copy, Debug)]
struct Place {
    first: u64,
    len: u64,
}

impl Place {
    fn read(self, mut file: &File) -> std::io::Result<Vec<u8>> {
        let mut bytes = vec![0; self.len as usize];
        file.seek(SeekFrom::Start(self.first))?;
        file.read_exact(&mut bytes)?;
        Ok(bytes)
    }
}

/// A frozen prefix whose bytes are those that were written.
#[derive(Debug)]
pub struct FrozenPrefix {
    /// The name of a prefix in memory, if it has no path.
    path: PathBuf,
    file: File,
    /// What a prefix in memory takes of the budget. Those who map it keep it too.
    memory: Option<Arc<Reservation>>,
    len: u64,
    header: Header,
    tokens: Vec<u32>,
    images: HashMap<String, Place>,
    /// Rows of K and V in a file without images: as large as these, and read again when they are copied.
    rows: HashMap<String, Place>,
    /// Held while a place of the file is read: reading moves its one cursor.
    reading: Mutex<()>,
    /// Tensors that are neither mapped nor read again.
    others: HashMap<String, Vec<u8>>,
}

impl FrozenPrefix {
    /// Opens a file, and reads it once to compare every hash: what is mapped later is in the page cache then.
    ///
    /// # Errors
    /// The file cannot be read, is no prefix, was written by a newer version, is torn or has changed.
    pub fn open(path: &Path) -> Result<Self, Error> {
        let file = File::open(path).map_err(|source| Error::Read { path: path.to_path_buf(), source })?;
        FrozenPrefix::of(file, path, None)
    }

    /// Reads `file` as [`open`](Self::open) does. Errors call it `path`.
    fn of(mut file: File, path: &Path, memory: Option<Arc<Reservation>>) -> Result<Self, Error> {
        let failed = |source| Error::Read { path: path.to_path_buf(), source };
        let name = path.display().to_string();
        let broken = |what: &str| FORMAT.broken(&name, what);
        let none = || FORMAT.none(&name);
        file.rewind().map_err(failed)?;
        let len = file.metadata().map_err(failed)?.len();
        let json = read_json(&mut file, len).map_err(failed)?.ok_or_else(none)?;
        let metadata: Metadata = serde_json::from_slice(&json[8..]).map_err(|_| none())?;
        let header: Header = FORMAT.header(&name, metadata.metadata())?;
        let tensors = metadata.tensors();
        if tensors.len() != header.blake3.len() {
            return Err(broken("it has other tensors than its header says"));
        }
        let ends = tensors.values().map(|info| info.data_offsets.1 as u64);
        if json.len() as u64 + ends.max().unwrap_or(0) != len {
            return Err(broken(&format!("it has {len} bytes, other than its header says")));
        }
        let begin = json.len() as u64;
        let (mut images, mut rows, mut others) = (HashMap::new(), HashMap::new(), HashMap::new());
        for (name, expected) in &header.blake3 {
            let info = tensors.get(name).ok_or_else(|| broken(&format!("it lacks `{name}`")))?;
            let (first, end) = (begin + info.data_offsets.0 as u64, begin + info.data_offsets.1 as u64);
            let place = Place { first, len: end - first };
            let bytes = place.read(&file).map_err(failed)?;
            if hash(&[&bytes]) != *expected {
                return Err(broken(&format!("the hash of `{name}` is another one")));
            }
            if name.ends_with(".image") {
                images.insert(name.clone(), place);
            } else if header.layout == NO_IMAGES && is_rows(name) {
                rows.insert(name.clone(), place);
            } else {
                others.insert(name.clone(), bytes);
            }
        }
        let tokens = others.get("tokens").and_then(|bytes| words_of(bytes));
        let tokens = tokens.filter(|tokens| tokens.len() == header.stored as usize && !tokens.is_empty());
        let tokens = tokens.ok_or_else(|| broken("its tokens are not those that were frozen"))?;
        let (path, reading) = (path.to_path_buf(), Mutex::new(()));
        Ok(FrozenPrefix { path, memory, file, len, header, tokens, images, rows, reading, others })
    }

    /// The file; `None` if the prefix lies in memory.
    pub fn path(&self) -> Option<&Path> {
        self.memory.is_none().then_some(&self.path)
    }
    /// What errors call it: its path, or the name of a prefix in memory.
    pub fn name(&self) -> String {
        self.path.display().to_string()
    }
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }
    /// The system message that the tokens begin a conversation with; `None` for plain text.
    pub fn system(&self) -> Option<&str> {
        self.header.system.as_deref()
    }
    pub fn origin(&self) -> &Origin {
        &self.header.origin
    }

    /// What tells its K and V from those that `maker` would have computed: `None` if that computed them.
    pub(crate) fn other_than(&self, maker: &str) -> Option<String> {
        let Header { maker: computed, blake3, .. } = &self.header;
        (computed != maker).then(|| format!("behind a prefix of {computed} with {blake3:?}"))
    }
    /// Bytes of the file, also of one in memory. All its users share them.
    pub fn len(&self) -> u64 {
        self.len
    }
    /// Never: a prefix has at least one token.
    pub fn is_empty(&self) -> bool {
        self.tokens.is_empty()
    }

    /// Compares the models alone.
    ///
    /// # Errors
    /// Names the first difference.
    pub fn check_model(&self, now: &Fingerprint) -> Result<(), Error> {
        self.header.origin.check_model(&self.name(), now)
    }

    /// Compares what the prefix depends on with what is used now.
    ///
    /// # Errors
    /// Names the first difference.
    pub fn check(&self, now: &Origin) -> Result<(), Error> {
        self.header.origin.check(&self.name(), now)
    }

    /// Whether layers that see everything are to be mapped. Otherwise all are copied, which every device does.
    pub(super) fn has_images(&self) -> bool {
        self.header.layout != NO_IMAGES
    }

    /// `now`: the layout that the device attends in place, if it does.
    pub(super) fn check_layout(&self, now: Option<&str>) -> Result<(), Error> {
        let (file, frozen) = (self.name(), &self.header.layout);
        let what = match now {
            _ if !self.has_images() => return Ok(()),
            Some(now) if now == frozen => return Ok(()),
            Some(now) => format!(
                "the prefix was frozen in the layout `{frozen}`, and this device has `{now}`: freeze it again"
            ),
            None => "the prefix was frozen on a device that attends files in place, and this one does not: freeze it again here, \
                     with the --backend that is to use it"
                .into(),
        };
        Err(Error::Malformed { file, what })
    }

    pub(super) fn file(&self) -> &File {
        &self.file
    }
    pub(super) fn memory(&self) -> Option<Arc<Reservation>> {
        self.memory.clone()
    }
    pub(super) fn cells(&self) -> u32 {
        self.header.stored.next_multiple_of(BLOCK)
    }

    fn misfit(&self) -> Error {
        let what = "its tensors do not fit the model".into();
        Error::Malformed { file: self.name(), what }
    }

    /// Where K or V of a layer lies. The origin has been checked.
    pub(super) fn side(&self, side: MappedSide) -> Result<MappedSide, Error> {
        let name = image_name(side);
        let place = self.images.get(&name).filter(|place| place.len > 0).ok_or_else(|| self.misfit())?;
        let finite = !self.header.not_finite.contains(&name);
        Ok(MappedSide { first: place.first, finite, ..side })
    }

    /// The rows of a layer group that is copied. The origin has been checked.
    pub(super) fn rows(&self, group: usize, sides: &[SideSpec]) -> Result<Rows, Error> {
        self.rows_of(&positions_name(group), sides, side_name)
    }

    /// The f16 rows of the newest tokens of a layer group, if the file has any. The origin has been checked.
    pub(super) fn recent_rows(&self, group: usize, sides: &[SideSpec]) -> Result<Rows, Error> {
        let name = recent_positions_name(group);
        match self.others.contains_key(&name) {
            true => self.rows_of(&name, sides, recent_name),
            false => Ok(Rows::default()),
        }
    }

    /// A tensor that is not mapped.
    fn tensor(&self, name: &str) -> Result<Cow<'_, [u8]>, Error> {
        if let Some(bytes) = self.others.get(name) {
            return Ok(bytes.into());
        }
        let place = self.rows.get(name).ok_or_else(|| self.misfit())?;
        let read = || {
            let _alone = self.reading.lock().unwrap_or_else(|broken| broken.into_inner());
            place.read(&self.file)
        };
        let bytes = read().map_err(|source| Error::Read { path: self.path.clone(), source })?;
        // Rows go on to a device: nothing would show later that they have changed since the file was opened.
        match self.header.blake3.get(name) {
            Some(expected) if hash(&[&bytes]) == *expected => Ok(bytes.into()),
            _ => Err(FORMAT.broken(&self.name(), &format!("the hash of `{name}` is another one"))),
        }
    }

    /// The positions in the tensor `positions`, and the rows of each side at these positions.
    fn rows_of(
        &self,
        positions: &str,
        sides: &[SideSpec],
        name: impl Fn(&SideSpec) -> String,
    ) -> Result<Rows, Error> {
        let positions = words_of(&self.tensor(positions)?).ok_or_else(|| self.misfit())?;
        let ascending = positions.is_sorted_by(|a, b| a < b);
        if !ascending || positions.last().is_some_and(|last| *last >= self.header.stored) {
            return Err(self.misfit());
        }
        let side = |side: &SideSpec| {
            let bytes = self.tensor(&name(side))?;
            let fits = bytes.len() == positions.len() * side.width();
            fits.then(|| bytes.into_owned()).ok_or_else(|| self.misfit())
        };
        Ok(Rows { sides: sides.iter().map(side).collect::<Result<_, Error>>()?, positions })
    }
}

/// The length and the JSON that a file of safetensors begins with. `None` if it does not.
fn read_json(file: &mut File, len: u64) -> std::io::Result<Option<Vec<u8>>> {
    let mut json = vec![0; 8];
    if len < 8 {
        return Ok(None);
    }
    file.read_exact(&mut json)?;
    let n = u64::from_le_bytes(std::array::from_fn(|i| json[i]));
    if n > LONGEST_HEADER || n + 8 > len {
        return Ok(None);
    }
    json.resize(8 + n as usize, 0);
    file.read_exact(&mut json[8..])?;
    Ok(Some(json))
}
