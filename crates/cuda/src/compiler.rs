//! Compiles kernels with NVRTC, and keeps what it compiled in a folder: `$XDG_CACHE_HOME/kvist/cuda`, or
//! `~/.cache/kvist/cuda`.
//!
//! A file's name is a hash of source, options and NVRTC's version, so a file is never stale. `--fmad=false`: sums are
//! contracted only where the source says `fmaf`, so that a row's bits do not depend on the variant of a kernel.
use crate::Installation;
use crate::ffi::{Code, Nvrtc};
use sha2::{Digest, Sha256};
use std::fmt;
use std::fs;
use std::path::PathBuf;

/// Why there is no compiler, or why a source does not compile.
#[derive(Clone, Debug)]
pub struct CompileError(String);

impl fmt::Display for CompileError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for CompileError {}

/// Code for compute capability 9.0 and for no other one: it can have the instructions of warpgroups.
const WARPGROUPS: &str = "sm_90a";

/// Compute capabilities of Tegra chips. Their code runs on no other GPU of the same major version.
const TEGRA: [i32; 3] = [72, 87, 101];

/// What a compiler of this version, which knows some compute capabilities, compiles for a GPU: the newest code that runs there. `None` if
/// the GPU is too old for it.
fn target(known: &[i32], wanted: i32, version: (i32, i32)) -> Option<String> {
    let older = |known: &&i32| **known == wanted || **known < wanted && !TEGRA.contains(known);
    let older = || known.iter().filter(older);
    // Code for 8.0 runs on 8.6, but not on 9.0; PTX for 8.0 runs on all of them.
    match older().filter(|known| **known / 10 == wanted / 10).max() {
        // With the instructions that only this GPU has. CUDA 12 is the first with such code.
        Some(90) if wanted == 90 && version.0 >= 12 => Some(WARPGROUPS.into()),
        Some(known) => Some(format!("sm_{known}")),
        None => older().max().map(|known| format!("compute_{known}")),
    }
}

/// A compiled kernel.
#[derive(Clone, Debug)]
pub struct Image {
    /// A cubin, or PTX where NVRTC does not know the GPU.
    pub bytes: Vec<u8>,
    /// Where it was found: a file that may be damaged.
    pub cached: Option<PathBuf>,
}

/// NVRTC, for one compute capability.
#[derive(Debug)]
pub struct Compiler {
    nvrtc: Nvrtc,
    version: (i32, i32),
    /// `sm_80`, or `compute_80` for PTX.
    target: String,
    cache: Option<PathBuf>,
}

/// The folder of this user's cache. `None` if the system names none.
pub(crate) fn cache_folder() -> Option<PathBuf> {
    let variable = |name| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let base = variable("XDG_CACHE_HOME").filter(|path| path.is_absolute());
    let base = base.or_else(|| Some(variable("HOME")?.join(".cache"))).or_else(|| variable("LOCALAPPDATA"));
    Some(base?.join("kvist").join("cuda"))
}

impl Compiler {
    /// A compiler for a GPU of this compute capability whose driver supports CUDA up to `driver` (12040 is 12.4).
    ///
    /// # Errors
    /// NVRTC is not installed, is newer than the driver, or too new for the GPU.
    pub fn new(
        installation: &Installation,
        (major, minor): (i32, i32),
        driver: i32,
    ) -> Result<Self, CompileError> {
        let error = |what: String| CompileError(what);
        let install = "install CUDA's toolkit or `pip install nvidia-cuda-nvrtc`, and name its file libnvrtc.so.13 in KVIST_NVRTC if \
                       the loader does not find it";
        let nvrtc = Nvrtc::open(installation.nvrtc.as_deref())
            .map_err(|what| error(format!("the compiler NVRTC is missing: {what}: {install}")))?;
        let failed = |code: Code| error(format!("NVRTC fails (error {})", code.0));
        let version = nvrtc.version().map_err(failed)?;
        if version.0 > driver / 1000 {
            let (a, b, c) = (version.0, version.1, driver / 1000);
            return Err(error(format!(
                "NVRTC is of CUDA {a}.{b}, and the driver supports CUDA {c}.{}: install a newer driver, or an NVRTC of CUDA \
                 {c} (`pip install nvidia-cuda-nvrtc-cu{c}`)",
                driver % 1000 / 10
            )));
        }
        let known = nvrtc.architectures().map_err(failed)?;
        let wanted = 10 * major + minor;
        let target = target(&known, wanted, version).ok_or_else(|| {
            error(format!(
                "NVRTC of CUDA {}.{} does not compile for GPUs of compute capability {major}.{minor}: install an older one",
                version.0, version.1
            ))
        })?;
        Ok(Compiler { nvrtc, version, target, cache: installation.cache.clone() })
    }

    /// Whether it compiles kernels that use the tensor cores of warpgroups.
    pub fn has_warpgroups(&self) -> bool {
        self.target == WARPGROUPS
    }

    /// What it compiles for: `sm_80`, or `compute_80` for PTX.
    pub fn target(&self) -> &str {
        &self.target
    }

    /// NVRTC's version.
    pub fn version(&self) -> (i32, i32) {
        self.version
    }

    fn options(target: &str) -> [String; 3] {
        [format!("--gpu-architecture={target}"), "--fmad=false".into(), "--std=c++17".into()]
    }

    /// Compiles a source for [`target`](Self::target), whatever is in the cache. Returns the image, and the compiler's log, with
    /// more `options`.
    ///
    /// # Errors
    /// The compiler's log.
    pub fn compile(
        &self,
        name: &str,
        source: &str,
        options: &[&str],
    ) -> Result<(Vec<u8>, String), CompileError> {
        self.compile_for(&self.target, name, source, options)
    }

    /// Compiles a source to PTX, in half the time.
    ///
    /// # Errors
    /// The compiler's log.
    pub fn ptx(&self, name: &str, source: &str) -> Result<Vec<u8>, CompileError> {
        Ok(self.compile_for(&self.target.replace("sm_", "compute_"), name, source, &[])?.0)
    }

    fn compile_for(
        &self,
        target: &str,
        name: &str,
        source: &str,
        options: &[&str],
    ) -> Result<(Vec<u8>, String), CompileError> {
        let all = Self::options(target);
        let options: Vec<&str> = all.iter().map(String::as_str).chain(options.iter().copied()).collect();
        let (image, log) =
            self.nvrtc.compile(&format!("{name}.cu"), source, &options, target.starts_with("sm_"));
        let image =
            image.map_err(|what| CompileError(format!("the kernel {name} does not compile: {what}")))?;
        Ok((image, log))
    }

    /// The compiled source, from the cache unless `anew`.
    pub fn image(&self, name: &str, source: &str, anew: bool) -> Result<Image, CompileError> {
        let file = self.cache.as_ref().map(|folder| {
            let key = format!("{:?}\n{:?}\n{source}", self.version, Self::options(&self.target));
            let hash: String =
                Sha256::digest(key).iter().take(16).map(|byte| format!("{byte:02x}")).collect();
            folder.join(format!("{name}-{hash}.bin"))
        });
        if let Some(file) = file.as_ref().filter(|_| !anew)
            && let Ok(bytes) = fs::read(file)
            && !bytes.is_empty()
        {
            return Ok(Image { bytes, cached: Some(file.clone()) });
        }
        let (bytes, _) = self.compile(name, source, &[])?;
        if let Some(file) = file
            && let Err(error) = keep(&file, &bytes)
        {
            tracing::debug!(target: "kvist::cuda", "{} is not written: {error}", file.display());
        }
        Ok(Image { bytes, cached: None })
    }
}

/// Writes a file as a whole: another process may read it meanwhile, or write the same one.
fn keep(file: &PathBuf, bytes: &[u8]) -> std::io::Result<()> {
    if let Some(folder) = file.parent() {
        fs::create_dir_all(folder)?;
    }
    let beside = file.with_extension(format!("{}.part", std::process::id()));
    fs::write(&beside, bytes)?;
    fs::rename(&beside, file).inspect_err(|_| {
        let _ = fs::remove_file(&beside);
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A GPU whose own code the compiler does not know got that of a Tegra chip, which does not load there.
    #[test]
    fn code_of_tegra_chips_is_for_them_alone() {
        let of_12_8 = [50, 70, 72, 75, 80, 86, 87, 89, 90, 100, 101, 120];
        let of_11_4 = [35, 50, 70, 72, 75, 80, 86, 87];
        for (known, wanted, version, expected) in [
            (&of_12_8[..], 103, (12, 8), Some("sm_100")),
            (&of_12_8, 101, (12, 8), Some("sm_101")),
            (&of_12_8, 87, (12, 8), Some("sm_87")),
            (&of_12_8, 90, (12, 8), Some("sm_90a")),
            (&of_12_8, 121, (12, 8), Some("sm_120")),
            (&of_12_8, 110, (12, 8), Some("compute_100")),
            (&of_11_4, 89, (11, 4), Some("sm_86")),
            (&of_11_4, 90, (11, 4), Some("compute_86")),
            (&of_11_4, 75, (11, 4), Some("sm_75")),
            (&of_11_4, 30, (11, 4), None),
        ] {
            assert_eq!(target(known, wanted, version).as_deref(), expected, "{wanted} by {version:?}");
        }
    }
}
