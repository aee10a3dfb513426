//! Downloads files from the Hub into the cache. Bytes are written to an `.incomplete` file and hashed as they
//! arrive; the file is renamed when size and hash match. An interrupted download is resumed.
use crate::cache::Repo;
use crate::client::{Client, Hash, Opened, Remote};
use crate::error::human;
use crate::{Error, HubName, Settings};
use sha1::Sha1;
use sha2::{Digest, Sha256};
use std::fs::{File, OpenOptions};
use std::io::{ErrorKind, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

/// Receives progress of downloads.
pub trait Progress {
    /// A download starts; `done` bytes of the file are already on disk.
    fn begin(&mut self, file: &str, size: u64, done: u64);
    /// `done` bytes of the current file are now on disk.
    fn at(&mut self, done: u64);
    /// The current download has finished or failed.
    fn end(&mut self);
    /// A message for the user.
    fn note(&mut self, text: &str);
    /// Returns whether the engine can run the model of this config.json. Called before the weights are
    /// downloaded; an error text ends the download.
    fn accept(&mut self, config: &Path) -> Result<(), String> {
        let _ = config;
        Ok(())
    }
}

/// Consecutive attempts without a single new byte before the download fails.
const ATTEMPTS: u32 = 5;

/// Read size in bytes, and so the interval between calls to [`Progress::at`].
const PIECE: usize = 256 << 10;

/// Downloads those of `files` that the snapshot of `commit` lacks. Checks for free disk space before the first
/// byte.
pub(crate) fn fetch(
    settings: &Settings,
    client: &Client<'_>,
    repo: &Repo,
    name: &HubName,
    commit: &str,
    files: &[Remote],
    progress: &mut dyn Progress,
) -> Result<(), Error> {
    let snapshot = repo.snapshot(commit);
    let here = |file: &Remote| is_whole(&snapshot.join(&file.path), file.size);
    let missing: Vec<&Remote> = files.iter().filter(|file| !here(file)).collect();
    let needed: u64 = missing.iter().map(|file| bytes_to_come(repo, file)).sum();
    if let Some(free) = (settings.free_bytes)(repo.path()).filter(|free| needed > *free) {
        return Err(Error::DiskFull { path: repo.path().into(), needed: human(needed), free: human(free) });
    }
    for file in missing {
        let blob = Download { settings, client, repo, name, file }.run(progress)?;
        link(&blob, &snapshot, &file.path)?;
    }
    Ok(())
}

fn is_whole(path: &Path, size: u64) -> bool {
    path.metadata().is_ok_and(|m| m.is_file() && m.len() == size)
}

fn part_of(repo: &Repo, file: &Remote) -> PathBuf {
    // huggingface_hub keeps partial downloads under the same name and resumes them.
    repo.blobs().join(format!("{}.incomplete", file.hash.hex()))
}

fn bytes_to_come(repo: &Repo, file: &Remote) -> u64 {
    if is_whole(&repo.blobs().join(file.hash.hex()), file.size) {
        return 0;
    }
    let have = part_of(repo, file).metadata().map_or(0, |m| m.len());
    if have <= file.size { file.size - have } else { file.size }
}

struct Download<'a> {
    settings: &'a Settings,
    client: &'a Client<'a>,
    repo: &'a Repo,
    name: &'a HubName,
    file: &'a Remote,
}

impl Download<'_> {
    /// Downloads and verifies the blob; returns its path.
    fn run(&self, progress: &mut dyn Progress) -> Result<PathBuf, Error> {
        let file = self.file;
        let blobs = self.repo.blobs();
        let blob = blobs.join(file.hash.hex());
        if is_whole(&blob, file.size) {
            return Ok(blob);
        }
        std::fs::create_dir_all(&blobs).map_err(Error::file("make", &blobs))?;
        let _lock = self.lock(progress)?;
        // Another program may have downloaded it in the meantime.
        if is_whole(&blob, file.size) {
            return Ok(blob);
        }
        let path = part_of(self.repo, file);
        let mut options = OpenOptions::new();
        let part = options.read(true).write(true).create(true).truncate(false).open(&path);
        let mut part = Part::new(part.map_err(Error::file("write", &path))?, path, file)?;
        // A partial file of another client may have holes. Then the hash does not match, and the file is
        // downloaded again from the start, once.
        let mut resumed = part.have > 0;
        progress.begin(&file.path, file.size, part.have);
        let done = loop {
            if let Err(error) = self.fill(&mut part, &mut resumed, progress) {
                break Err(error);
            }
            match part.check(file) {
                Ok(()) => break Ok(()),
                Err(_) if resumed => {
                    progress.note(&format!(
                        "{}: the partial download is damaged; downloading it again",
                        file.path
                    ));
                    resumed = false;
                    if let Err(error) = part.start_anew(file) {
                        break Err(error);
                    }
                }
                Err(what) => {
                    let _ = std::fs::remove_file(&part.path);
                    break Err(Error::Damaged { file: file.path.clone(), what });
                }
            }
        };
        progress.end();
        done?;
        part.file.sync_all().map_err(Error::file("write", &part.path))?;
        std::fs::rename(&part.path, &blob).map_err(Error::file("write", &blob))?;
        Ok(blob)
    }

    /// Takes the lock of this blob, and waits while another program downloads it.
    fn lock(&self, progress: &mut dyn Progress) -> Result<Option<File>, Error> {
        let path = self.repo.lock(self.file.hash.hex());
        let folder = path.parent().unwrap_or(self.repo.path());
        std::fs::create_dir_all(folder).map_err(Error::file("make", folder))?;
        let lock = OpenOptions::new().write(true).create(true).truncate(false).open(&path);
        let lock = lock.map_err(Error::file("write", &path))?;
        match lock.try_lock() {
            Ok(()) => Ok(Some(lock)),
            Err(std::fs::TryLockError::WouldBlock) => {
                progress.note(&format!("{}: another program is downloading it; waiting", self.file.path));
                lock.lock().map_err(Error::file("lock", &path))?;
                Ok(Some(lock))
            }
            // Some file systems do not support locks. Two programs that download the same file there each
            // verify their own result.
            Err(std::fs::TryLockError::Error(_)) => Ok(None),
        }
    }

    /// Reads until the file is complete. A broken connection is retried up to [`ATTEMPTS`] times; each new byte
    /// resets the count.
    fn fill(&self, part: &mut Part, resumed: &mut bool, progress: &mut dyn Progress) -> Result<(), Error> {
        let size = self.file.size;
        let mut attempts = 0;
        let mut piece = vec![0; PIECE];
        while part.have < size {
            let before = part.have;
            let cause = match self.client.open(self.name, self.file, part.have) {
                Ok(Opened::NothingThere) if part.have > 0 => {
                    *resumed = false;
                    part.start_anew(self.file)?;
                    "the download cannot be resumed".into()
                }
                Ok(Opened::NothingThere) => "the server has no bytes of it".into(),
                Ok(Opened::From(start, mut reader)) => {
                    if start != part.have {
                        *resumed = false;
                        part.start_anew(self.file)?; // the server does not support ranges
                    }
                    part.copy(&mut reader, size, &mut piece, progress)?
                }
                Err(error) if error.is_unreachable() => error.to_string(),
                Err(error) => return Err(error),
            };
            if part.have >= size {
                break;
            }
            attempts = if part.have > before { 1 } else { attempts + 1 };
            if attempts >= ATTEMPTS {
                let _ = part.file.sync_all();
                return Err(Error::BrokeOff { file: self.file.path.clone(), have: part.have, size, cause });
            }
            std::thread::sleep(self.settings.pause * attempts);
        }
        Ok(())
    }
}

/// A partially downloaded file, and the hash of its bytes so far.
struct Part {
    file: File,
    path: PathBuf,
    have: u64,
    hash: Hasher,
}

enum Hasher {
    Sha256(Sha256),
    Git(Sha1),
}

impl Hasher {
    fn new(file: &Remote) -> Self {
        match file.hash {
            Hash::Sha256(_) => Hasher::Sha256(Sha256::new()),
            Hash::Git(_) => Hasher::Git(Sha1::new_with_prefix(format!("blob {}\0", file.size))),
        }
    }
    fn update(&mut self, bytes: &[u8]) {
        match self {
            Hasher::Sha256(hash) => hash.update(bytes),
            Hasher::Git(hash) => hash.update(bytes),
        }
    }
    fn hex(&self) -> String {
        let bytes = match self {
            Hasher::Sha256(hash) => hash.clone().finalize().to_vec(),
            Hasher::Git(hash) => hash.clone().finalize().to_vec(),
        };
        bytes.iter().map(|byte| format!("{byte:02x}")).collect()
    }
}

impl Part {
    /// Starts with the bytes that are already in the file, and hashes them.
    fn new(file: File, path: PathBuf, remote: &Remote) -> Result<Self, Error> {
        let mut part = Part { file, path, have: 0, hash: Hasher::new(remote) };
        let mut piece = vec![0; PIECE];
        while part.have <= remote.size {
            match part.file.read(&mut piece) {
                Ok(0) => break,
                Ok(n) => {
                    part.hash.update(&piece[..n]);
                    part.have += n as u64;
                }
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(Error::file("read", &part.path)(error)),
            }
        }
        if part.have > remote.size {
            part.start_anew(remote)?;
        }
        Ok(part)
    }

    fn start_anew(&mut self, remote: &Remote) -> Result<(), Error> {
        let emptied = self.file.set_len(0).and_then(|()| self.file.seek(SeekFrom::Start(0)));
        emptied.map_err(Error::file("write", &self.path))?;
        (self.have, self.hash) = (0, Hasher::new(remote));
        Ok(())
    }

    /// Copies from `reader` until it ends. Returns the reason why it ended, as text. An `Err` means that
    /// writing to disk failed.
    fn copy(
        &mut self,
        reader: &mut dyn Read,
        size: u64,
        piece: &mut [u8],
        progress: &mut dyn Progress,
    ) -> Result<String, Error> {
        while self.have < size {
            let room = piece.len().min(usize::try_from(size - self.have).unwrap_or(usize::MAX));
            let n = match reader.read(&mut piece[..room]) {
                Ok(0) => break,
                Ok(n) => n,
                Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                Err(error) => return Ok(error.to_string()),
            };
            self.file.write_all(&piece[..n]).map_err(Error::file("write", &self.path))?;
            self.hash.update(&piece[..n]);
            self.have += n as u64;
            progress.at(self.have);
        }
        Ok("the connection was closed".into())
    }

    fn check(&self, remote: &Remote) -> Result<(), String> {
        let (found, expected) = (self.hash.hex(), remote.hash.hex());
        match found == expected {
            true => Ok(()),
            false => Err(format!("its hash is {found}; expected {expected}")),
        }
    }
}

/// Places the blob in a snapshot: a relative link, which stays valid if the cache is moved. If links are not
/// supported, the blob itself is moved there, as huggingface_hub does.
fn link(blob: &Path, snapshot: &Path, path: &str) -> Result<(), Error> {
    let place = snapshot.join(path);
    let folder = place.parent().unwrap_or(snapshot);
    std::fs::create_dir_all(folder).map_err(Error::file("make", folder))?;
    // Another program may have created the link already.
    let leads_there =
        || place.canonicalize().is_ok_and(|at| blob.canonicalize().is_ok_and(|blob| at == blob));
    if leads_there() {
        return Ok(());
    }
    // A broken link, or a link to an older blob.
    if place.symlink_metadata().is_ok() {
        let _ = std::fs::remove_file(&place); // may be gone already; other failures show up below
    }
    #[cfg(unix)]
    {
        let up = "../".repeat(path.split('/').count() + 1);
        let name = blob.file_name().unwrap_or_default().to_string_lossy();
        if std::os::unix::fs::symlink(format!("{up}blobs/{name}"), &place).is_ok() || leads_there() {
            return Ok(());
        }
    }
    std::fs::rename(blob, &place).map_err(Error::file("write", &place))
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Silent;
    impl Progress for Silent {
        fn begin(&mut self, _: &str, _: u64, _: u64) {}
        fn at(&mut self, _: u64) {}
        fn end(&mut self) {}
        fn note(&mut self, _: &str) {}
    }

    /// `/dev/full` fails every write with "no space left".
    #[cfg(target_os = "linux")]
    #[test]
    fn a_disk_that_becomes_full_is_said_and_not_tried_again() {
        let path = PathBuf::from("/dev/full");
        let file = OpenOptions::new().write(true).open(&path).unwrap();
        let remote =
            Remote { path: "x".into(), size: 8, hash: Hash::Sha256(String::new()), url: String::new() };
        let mut part = Part { file, path, have: 0, hash: Hasher::new(&remote) };
        let copied = part.copy(&mut &[0u8; 8][..], 8, &mut [0; 4], &mut Silent);
        let said = copied.unwrap_err().to_string();
        assert!(said.contains("no space is left on the device"), "{said}");
        assert_eq!(part.have, 0);
    }

    #[test]
    fn a_part_that_is_too_long_is_none() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("part");
        std::fs::write(&path, [7; 1 << 20]).unwrap();
        let remote =
            Remote { path: "x".into(), size: 8, hash: Hash::Sha256(String::new()), url: String::new() };
        let file = OpenOptions::new().read(true).write(true).open(&path).unwrap();
        let part = Part::new(file, path.clone(), &remote).unwrap();
        assert_eq!((part.have, path.metadata().unwrap().len()), (0, 0));
    }
}
