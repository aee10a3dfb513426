//! A host in Rust: it runs a .pte in ExecuTorch's own runtime, greedily, over a cache whose kind and dtype it chooses now.
//!
//!     host model.pte f32|q8 5 17 3 88        # prints ten tokens
//!
//! Compiled by build.sh with rustc alone: everything else is in libkvist_executorch.so and the wheel's libraries.
use std::ffi::{CStr, CString, c_char, c_long, c_void};

#[repr(C)]
struct Config {
    capacity: i32,
    n_layers: i32,
    n_kv_heads: i32,
    head_dim: i32,
    min_chunk: i32,
    kv_dtype: i32,
    group_size: i32,
    bits: i32,
    max_step_tokens: i32,
    threads: i32,
    windows: *const i32,
    n_windows: i32,
}

unsafe extern "C" {
    fn kvist_et_last_error() -> *const c_char;
    fn kvist_et_session(backend: *const c_char, kind: *const c_char, config: *const Config) -> *mut c_void;
    fn kvist_et_free(session: *mut c_void);
    fn kvist_et_enter(session: *mut c_void) -> c_long;
    fn kvist_et_leave(session: *mut c_void);
    fn kvist_et_can_extend(session: *mut c_void, n: i32) -> c_long;
    fn kvist_et_program_open(path: *const c_char) -> *mut c_void;
    fn kvist_et_program_free(program: *mut c_void);
    fn kvist_et_program_params(program: *mut c_void, params: *mut i32) -> c_long;
    fn kvist_et_program_forward(
        program: *mut c_void,
        tokens: *mut i64,
        positions: *mut i64,
        n: i32,
        rows: *mut i64,
        n_rows: i32,
        logits: *mut *const f32,
    ) -> c_long;
}

fn last_error() -> String {
    // SAFETY: the text is null-terminated and lives until this thread's next call.
    unsafe { CStr::from_ptr(kvist_et_last_error()) }.to_string_lossy().into_owned()
}

/// A program, loaded once.
struct Program(*mut c_void);
/// A cache for it.
struct Session(*mut c_void);

impl Program {
    fn open(path: &str) -> Result<Self, String> {
        let path = CString::new(path).map_err(|why| why.to_string())?;
        // SAFETY: the path is null-terminated.
        let program = unsafe { kvist_et_program_open(path.as_ptr()) };
        if program.is_null() { Err(last_error()) } else { Ok(Program(program)) }
    }

    fn session(&self, kind: &CStr, capacity: i32, q8: bool) -> Result<Session, String> {
        let mut params = [0; 3];
        // SAFETY: the program is open, and `params` holds three numbers.
        if unsafe { kvist_et_program_params(self.0, params.as_mut_ptr()) } < 0 {
            return Err(last_error());
        }
        let [n_layers, n_kv_heads, head_dim] = params;
        let config = Config {
            capacity,
            n_layers,
            n_kv_heads,
            head_dim,
            min_chunk: 512,
            kv_dtype: if q8 { 0 } else { 6 }, // Byte: codes; Float
            group_size: 32,
            bits: 8,
            max_step_tokens: 0,
            threads: 0,
            windows: std::ptr::null(),
            n_windows: 0,
        };
        // SAFETY: all strings are null-terminated, and there are no windows to read.
        let session = unsafe { kvist_et_session(c"kvist".as_ptr(), kind.as_ptr(), &config) };
        if session.is_null() { Err(last_error()) } else { Ok(Session(session)) }
    }

    /// Executes `tokens` from `position` on; returns the most likely next one.
    fn next(&self, session: &Session, tokens: &[i64], position: i64) -> Result<i64, String> {
        let mut tokens = tokens.to_vec();
        let mut positions: Vec<i64> = (position..).take(tokens.len()).collect();
        let mut rows = [tokens.len() as i64 - 1];
        let (n, mut logits) = (tokens.len() as i32, std::ptr::null());
        // SAFETY: program and session are alive; the arrays hold `n`, `n` and one element.
        let vocab = unsafe {
            if kvist_et_enter(session.0) < 0 {
                return Err(last_error());
            }
            let (tokens, positions) = (tokens.as_mut_ptr(), positions.as_mut_ptr());
            let vocab =
                kvist_et_program_forward(self.0, tokens, positions, n, rows.as_mut_ptr(), 1, &mut logits);
            kvist_et_leave(session.0);
            vocab
        };
        let vocab = usize::try_from(vocab).map_err(|_| last_error())?;
        // SAFETY: one row of `vocab` logits, valid until the next execution.
        let row = unsafe { std::slice::from_raw_parts(logits, vocab) };
        let best = row.iter().enumerate().max_by(|a, b| a.1.total_cmp(b.1)).map(|(token, _)| token as i64);
        best.ok_or_else(|| "the program has no vocabulary".into())
    }
}

impl Session {
    fn can_extend(&self) -> bool {
        // SAFETY: the session is alive.
        unsafe { kvist_et_can_extend(self.0, 1) == 1 }
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        // SAFETY: opened once, freed once.
        unsafe { kvist_et_program_free(self.0) }
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        // SAFETY: made once, freed once.
        unsafe { kvist_et_free(self.0) }
    }
}

fn run() -> Result<(), String> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [path, dtype, prompt @ ..] = &arguments[..] else {
        return Err("usage: host model.pte f32|q8 TOKEN...".into());
    };
    let program = Program::open(path)?;
    let session = program.session(c"contiguous", 128, dtype == "q8")?;
    let prompt: Result<Vec<i64>, _> = prompt.iter().map(|token| token.parse::<i64>()).collect();
    let mut fed = prompt.map_err(|why| format!("a token is a number: {why}"))?;
    let mut position = 0;
    for _ in 0..10 {
        if !session.can_extend() {
            break;
        }
        let token = program.next(&session, &fed, position)?;
        position += fed.len() as i64;
        println!("{token}");
        fed = vec![token];
    }
    Ok(())
}

fn main() -> std::process::ExitCode {
    match run() {
        Ok(()) => std::process::ExitCode::SUCCESS,
        Err(why) => {
            eprintln!("{why}");
            std::process::ExitCode::FAILURE
        }
    }
}
