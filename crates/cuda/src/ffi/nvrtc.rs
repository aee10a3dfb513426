//! Calls of the compiler.
use super::{Code, Handle, LoadError, Nvrtc, candidates, check};
use std::ffi::{CString, c_char, c_int};
use std::path::Path;

/// What NVRTC made of a source, or its log.
pub type Compiled = Result<Vec<u8>, String>;

impl Nvrtc {
    /// Loads the compiler: from a file, or from where the system keeps it.
    pub fn open(named: Option<&Path>) -> Result<Self, LoadError> {
        let usual: &[&str] = if cfg!(windows) {
            &["nvrtc64_130_0.dll", "nvrtc64_120_0.dll"]
        } else {
            &["libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"]
        };
        Self::load(&candidates(named, usual))
    }

    /// Major and minor version.
    pub fn version(&self) -> Result<(i32, i32), Code> {
        let (mut major, mut minor) = (0, 0);
        // SAFETY: NVRTC writes two numbers.
        check(unsafe { (self.nvrtcVersion)(&mut major, &mut minor) })?;
        Ok((major, minor))
    }

    /// The compute capabilities that it compiles for, as 90 for 9.0.
    pub fn architectures(&self) -> Result<Vec<i32>, Code> {
        let mut n = 0;
        // SAFETY: NVRTC writes one number.
        check(unsafe { (self.nvrtcGetNumSupportedArchs)(&mut n) })?;
        let mut found = vec![0; usize::try_from(n).unwrap_or(0)];
        // SAFETY: NVRTC writes as many numbers as it said.
        check(unsafe { (self.nvrtcGetSupportedArchs)(found.as_mut_ptr()) })?;
        Ok(found)
    }

    /// Compiles `source` to a cubin or to PTX, which ends with 0. With the log, also if nothing went wrong.
    pub fn compile(&self, name: &str, source: &str, options: &[&str], cubin: bool) -> (Compiled, String) {
        let text = |text: &str| CString::new(text).map_err(|_| "a source with a 0 in it".to_string());
        let (source, name) = match (text(source), text(name)) {
            (Ok(source), Ok(name)) => (source, name),
            (Err(what), _) | (_, Err(what)) => return (Err(what), String::new()),
        };
        let options: Vec<CString> = options.iter().filter_map(|option| CString::new(*option).ok()).collect();
        let options: Vec<*const c_char> = options.iter().map(|option| option.as_ptr()).collect();
        let mut program = std::ptr::null_mut();
        let none = std::ptr::null();
        // SAFETY: both texts end with 0, and there are no headers.
        let code =
            unsafe { (self.nvrtcCreateProgram)(&mut program, source.as_ptr(), name.as_ptr(), 0, none, none) };
        if code != 0 {
            return (Err(format!("NVRTC error {code}")), String::new());
        }
        // SAFETY: the program exists, and every option ends with 0.
        let code = unsafe { (self.nvrtcCompileProgram)(program, options.len() as c_int, options.as_ptr()) };
        let log = self.take(program, self.nvrtcGetProgramLogSize, self.nvrtcGetProgramLog);
        let log = String::from_utf8_lossy(&log.unwrap_or_default()).trim_end_matches('\0').to_string();
        let image = match (code, cubin) {
            (0, true) => self.take(program, self.nvrtcGetCUBINSize, self.nvrtcGetCUBIN),
            (0, false) => self.take(program, self.nvrtcGetPTXSize, self.nvrtcGetPTX),
            _ => Err(Code(code)),
        };
        // SAFETY: the program exists, and is not used again.
        unsafe { (self.nvrtcDestroyProgram)(&mut program) };
        (image.map_err(|code| format!("NVRTC error {}\n{log}", code.0)), log)
    }

    fn take(
        &self,
        program: Handle,
        size: unsafe extern "C" fn(Handle, *mut usize) -> c_int,
        get: unsafe extern "C" fn(Handle, *mut c_char) -> c_int,
    ) -> Result<Vec<u8>, Code> {
        let mut bytes = 0;
        // SAFETY: the program exists, and NVRTC writes one number.
        check(unsafe { size(program, &mut bytes) })?;
        let mut found = vec![0u8; bytes];
        // SAFETY: NVRTC writes as many bytes as it said.
        check(unsafe { get(program, found.as_mut_ptr().cast()) })?;
        Ok(found)
    }
}
