//! Files of a shared folder that are being written, or that a write has left behind.
//!
//! opendal writes to a file beside the blocks and renames it when it is whole. It removes none that it does not finish:
//! a full or slow folder would fill up with them.
use opendal::{Buffer, ErrorKind, Operator, Writer};
use std::path::Path;
use std::time::{Duration, SystemTime};
use tokio::runtime::Handle;
use tokio::sync::oneshot;

/// No write takes so long.
const ABANDONED: Duration = Duration::from_secs(3600);

/// Writes a file as a whole, or leaves nothing: also if it is dropped, as by a caller whose time is over.
pub(super) async fn write(operator: &Operator, path: &str, bytes: Buffer) -> Result<(), opendal::Error> {
    let mut unfinished =
        begin(operator.writer(path).await?, bytes.slice(..bytes.len().min(1)).to_vec()).await?;
    let Some(writer) = &mut unfinished.0 else { return Ok(()) };
    let written = match writer.write(bytes.slice(bytes.len().min(1)..)).await {
        Ok(()) => writer.close().await.map(|_| ()),
        Err(error) => Err(error),
    };
    if written.is_err() {
        // What cannot be removed now is removed when the folder is opened again.
        let _ = writer.abort().await;
    }
    unfinished.0 = None;
    written
}

/// Writes the first byte, with which opendal makes the file. A writer that is dropped meanwhile would not know of its file, so this runs
/// in a task of its own, which goes on if its caller does not.
async fn begin(writer: Writer, first: Vec<u8>) -> Result<Unfinished, opendal::Error> {
    let (send, begun) = oneshot::channel();
    tokio::spawn(async move {
        let mut unfinished = Unfinished(Some(writer));
        let written = match &mut unfinished.0 {
            Some(writer) => writer.write(first).await,
            None => Ok(()),
        };
        // Without a caller the file is removed here.
        let _ = send.send(written.map(|()| unfinished));
    });
    begun.await.unwrap_or_else(|_| Err(opendal::Error::new(ErrorKind::Unexpected, "the runtime has ended")))
}

/// Removes the file of a write that is not over when it is dropped.
struct Unfinished(Option<Writer>);

impl Drop for Unfinished {
    fn drop(&mut self) {
        if let (Some(mut writer), Ok(runtime)) = (self.0.take(), Handle::try_current()) {
            runtime.spawn(async move {
                let _ = writer.abort().await;
            });
        }
    }
}

/// Removes what processes that are gone have left in `folder`. Other processes may be writing there: what is young
/// stays. A file that cannot be removed stays too.
pub(super) fn remove_abandoned(folder: &Path, now: SystemTime) {
    let Ok(files) = std::fs::read_dir(folder) else { return };
    for file in files.flatten() {
        let written = file.metadata().and_then(|file| file.modified());
        let age = written.ok().and_then(|written| now.duration_since(written).ok());
        if age.is_some_and(|age| age > ABANDONED) {
            let _ = std::fs::remove_file(file.path());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_young_stays() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("ab.x");
        std::fs::write(&file, "half").unwrap();
        let written = file.metadata().unwrap().modified().unwrap();
        for (after_s, stays) in [(0, true), (3600, true), (3601, false)] {
            remove_abandoned(dir.path(), written + Duration::from_secs(after_s));
            assert_eq!(file.exists(), stays, "after {after_s} s");
        }
        remove_abandoned(&dir.path().join("absent"), written);
    }
}
