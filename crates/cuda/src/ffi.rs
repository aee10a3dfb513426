//! CUDA's driver and NVRTC, loaded when a device is opened. Unsafe code is here and in `ffi/` alone.
//!
//! Result codes stay numbers: a driver may return codes that are newer than this program. Every symbol is looked up at the
//! start, so that a library that is too old is an error that names the symbol. Only the functions of graphs may be missing (`graph.rs`).
mod arena;
mod context;
mod graph;
mod nvrtc;

pub use arena::Arena;
pub use context::{
    Context, DeviceMemory, Event, Function, Launch, LockedMemory, MAX_BUFFERS, PinnedMemory, Stream,
};
pub use graph::Graph;
use libloading::Library;
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Handles of the driver.
type Handle = *mut c_void;

/// What a call returned: not 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Code(pub c_int);

impl Code {
    pub const OUT_OF_MEMORY: Code = Code(2);
    pub const NO_DEVICE: Code = Code(100);
    pub const NOT_READY: Code = Code(600);
    pub const NOT_SUPPORTED: Code = Code(801);
}

/// A library that could not be loaded.
#[derive(Clone, Debug)]
pub enum LoadError {
    /// None of these files could be opened; the last reason.
    Missing { tried: Vec<PathBuf>, reason: String },
    /// It lacks a function.
    TooOld { path: PathBuf, symbol: &'static str },
}

impl fmt::Display for LoadError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            LoadError::Missing { tried, reason } => {
                let names: Vec<_> = tried.iter().map(|path| path.display().to_string()).collect();
                write!(f, "none of {} can be loaded ({reason})", names.join(", "))
            }
            LoadError::TooOld { path, symbol } => {
                write!(f, "{} is too old: it has no function {symbol}", path.display())
            }
        }
    }
}

macro_rules! library {
    ($(#[$doc:meta])* $name:ident { $($function:ident($($kind:ty),*);)* }) => {
        $(#[$doc])*
        #[allow(non_snake_case)] // the names of the C API
        pub struct $name {
            $($function: unsafe extern "C" fn($($kind),*) -> c_int,)*
            _library: Library,
        }
        impl $name {
            /// The first of these files that can be opened.
            fn load(paths: &[PathBuf]) -> Result<Self, LoadError> {
                let mut reason = String::new();
                for path in paths {
                    // SAFETY: NVIDIA's libraries may be initialised at any time, and so may the tests' emulation of them.
                    match unsafe { Library::new(path) } {
                        Ok(library) => return Self::of(library, path),
                        Err(error) => reason = error.to_string(),
                    }
                }
                Err(LoadError::Missing { tried: paths.to_vec(), reason })
            }
            #[allow(non_snake_case)]
            fn of(library: Library, path: &Path) -> Result<Self, LoadError> {
                // SAFETY: the types are those of the API's headers, which never change for a symbol. The pointers are
                // used only while the library is loaded: both are fields of one value.
                $(let $function = unsafe {
                    *library.get(concat!(stringify!($function), "\0").as_bytes()).map_err(|_| {
                        LoadError::TooOld { path: path.into(), symbol: stringify!($function) }
                    })?
                };)*
                Ok($name { $($function,)* _library: library })
            }
        }
        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(stringify!($name))
            }
        }
    };
}

library! {
    /// The driver, `libcuda`.
    Cuda {
        cuInit(c_uint);
        cuDriverGetVersion(*mut c_int);
        cuGetErrorName(c_int, *mut *const c_char);
        cuGetErrorString(c_int, *mut *const c_char);
        cuDeviceGetCount(*mut c_int);
        cuDeviceGet(*mut c_int, c_int);
        cuDeviceGetName(*mut c_char, c_int, c_int);
        cuDeviceGetAttribute(*mut c_int, c_int, c_int);
        cuDeviceTotalMem_v2(*mut usize, c_int);
        cuDevicePrimaryCtxRetain(*mut Handle, c_int);
        cuDevicePrimaryCtxRelease_v2(c_int);
        cuCtxSetCurrent(Handle);
        cuCtxSynchronize();
        cuMemGetInfo_v2(*mut usize, *mut usize);
        cuMemAlloc_v2(*mut u64, usize);
        cuMemFree_v2(u64);
        cuMemHostAlloc(*mut *mut c_void, usize, c_uint);
        cuMemFreeHost(*mut c_void);
        cuMemsetD8Async(u64, u8, usize, Handle);
        cuMemcpyHtoDAsync_v2(u64, *const c_void, usize, Handle);
        cuMemcpyDtoHAsync_v2(*mut c_void, u64, usize, Handle);
        cuMemcpyDtoDAsync_v2(u64, u64, usize, Handle);
        cuStreamCreate(*mut Handle, c_uint);
        cuStreamSynchronize(Handle);
        cuStreamWaitEvent(Handle, Handle, c_uint);
        cuStreamDestroy_v2(Handle);
        cuEventCreate(*mut Handle, c_uint);
        cuEventRecord(Handle, Handle);
        cuEventElapsedTime(*mut f32, Handle, Handle);
        cuEventQuery(Handle);
        cuEventDestroy_v2(Handle);
        cuModuleLoadDataEx(*mut Handle, *const c_void, c_uint, *mut c_int, *mut *mut c_void);
        cuModuleUnload(Handle);
        cuModuleGetFunction(*mut Handle, Handle, *const c_char);
        cuFuncSetAttribute(Handle, c_int, c_int);
        cuLaunchKernel(
            Handle, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, Handle, *mut *mut c_void, *mut *mut c_void
        );
    }
}

library! {
    /// The compiler, `libnvrtc`.
    Nvrtc {
        nvrtcVersion(*mut c_int, *mut c_int);
        nvrtcGetNumSupportedArchs(*mut c_int);
        nvrtcGetSupportedArchs(*mut c_int);
        nvrtcCreateProgram(
            *mut Handle, *const c_char, *const c_char, c_int, *const *const c_char, *const *const c_char
        );
        nvrtcDestroyProgram(*mut Handle);
        nvrtcCompileProgram(Handle, c_int, *const *const c_char);
        nvrtcGetProgramLogSize(Handle, *mut usize);
        nvrtcGetProgramLog(Handle, *mut c_char);
        nvrtcGetPTXSize(Handle, *mut usize);
        nvrtcGetPTX(Handle, *mut c_char);
        nvrtcGetCUBINSize(Handle, *mut usize);
        nvrtcGetCUBIN(Handle, *mut c_char);
    }
}

fn check(code: c_int) -> Result<(), Code> {
    if code == 0 { Ok(()) } else { Err(Code(code)) }
}

/// The files to try: the one that was named, alone, or the usual ones.
fn candidates(named: Option<&Path>, usual: &[&str]) -> Vec<PathBuf> {
    named.map_or_else(|| usual.iter().map(PathBuf::from).collect(), |path| vec![path.into()])
}

impl Cuda {
    /// Loads and initialises the driver: from a file, or from where the system keeps it.
    pub fn open(named: Option<&Path>) -> Result<Result<Arc<Self>, (Code, String)>, LoadError> {
        let usual: &[&str] = if cfg!(windows) { &["nvcuda.dll"] } else { &["libcuda.so.1", "libcuda.so"] };
        let cuda = Arc::new(Self::load(&candidates(named, usual))?);
        // SAFETY: the only flag that there is.
        let code = unsafe { (cuda.cuInit)(0) };
        Ok(match check(code) {
            Ok(()) => Ok(cuda),
            Err(code) => Err((code, cuda.text(code))),
        })
    }

    /// The driver's name and description of a code.
    pub fn text(&self, code: Code) -> String {
        let describe = |function: unsafe extern "C" fn(c_int, *mut *const c_char) -> c_int| {
            let mut text = std::ptr::null();
            // SAFETY: the driver writes null or a string that lives as long as the library.
            let found = unsafe { function(code.0, &mut text) };
            // SAFETY: as above, and it is not null.
            (found == 0 && !text.is_null())
                .then(|| unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned())
        };
        match (describe(self.cuGetErrorName), describe(self.cuGetErrorString)) {
            (Some(name), Some(what)) => format!("{name}: {what}"),
            (Some(name), None) => name,
            _ => format!("CUDA error {}", code.0),
        }
    }

    /// The newest CUDA that the driver supports: 12040 is 12.4.
    pub fn version(&self) -> Result<i32, Code> {
        let mut version = 0;
        // SAFETY: the driver writes one number.
        check(unsafe { (self.cuDriverGetVersion)(&mut version) })?;
        Ok(version)
    }

    pub fn n_devices(&self) -> Result<usize, Code> {
        let mut n = 0;
        // SAFETY: the driver writes one number.
        check(unsafe { (self.cuDeviceGetCount)(&mut n) })?;
        Ok(usize::try_from(n).unwrap_or(0))
    }

    /// The device's handle.
    pub fn device(&self, index: usize) -> Result<c_int, Code> {
        let mut device = 0;
        let index = c_int::try_from(index).map_err(|_| Code(101))?;
        // SAFETY: the driver checks the index, and writes one handle.
        check(unsafe { (self.cuDeviceGet)(&mut device, index) })?;
        Ok(device)
    }

    pub fn name(&self, device: c_int) -> Result<String, Code> {
        let mut name = [0; 256];
        // SAFETY: the driver writes at most 256 bytes, the last of them 0.
        check(unsafe { (self.cuDeviceGetName)(name.as_mut_ptr(), 256, device) })?;
        let bytes: Vec<u8> = name.iter().take_while(|c| **c != 0).map(|c| *c as u8).collect();
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    }

    pub fn attribute(&self, device: c_int, attribute: c_int) -> Result<i32, Code> {
        let mut value = 0;
        // SAFETY: the driver checks the attribute, and writes one number.
        check(unsafe { (self.cuDeviceGetAttribute)(&mut value, attribute, device) })?;
        Ok(value)
    }

    pub fn total_bytes(&self, device: c_int) -> Result<u64, Code> {
        let mut bytes = 0usize;
        // SAFETY: the driver writes one number.
        check(unsafe { (self.cuDeviceTotalMem_v2)(&mut bytes, device) })?;
        Ok(bytes as u64)
    }
}
