//! Files without a name, in the memory of this process.
use std::fs::File;
use std::io;

/// An empty one. `name` is what lists of the process's memory call it.
#[cfg(target_os = "linux")]
pub fn create(name: &str) -> io::Result<File> {
    use rustix::fs::{MemfdFlags, memfd_create};
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let file = match memfd_create(name, flags | MemfdFlags::NOEXEC_SEAL) {
        // Linux before 6.3 does not know that flag. Some later ones insist on it.
        Err(rustix::io::Errno::INVAL) => memfd_create(name, flags),
        other => other,
    };
    Ok(File::from(file?))
}

/// From now on the file cannot be written to or cut.
#[cfg(target_os = "linux")]
pub fn seal(file: &File) -> io::Result<()> {
    use rustix::fs::{SealFlags, fcntl_add_seals};
    let seals = SealFlags::WRITE | SealFlags::GROW | SealFlags::SHRINK | SealFlags::SEAL;
    Ok(fcntl_add_seals(file, seals)?)
}

/// An empty one. Other systems have none in memory: it lies in the folder for temporary files, where no other program finds it.
#[cfg(not(target_os = "linux"))]
pub fn create(_name: &str) -> io::Result<File> {
    tempfile::tempfile()
}

/// It has no name, so no other program can open it.
#[cfg(not(target_os = "linux"))]
pub fn seal(_file: &File) -> io::Result<()> {
    Ok(())
}
