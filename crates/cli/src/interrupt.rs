//! Ctrl-C, or a termination signal, ends the work at the next token, with the summary; a second one ends the program.
//! When nothing is being computed the first one ends the program: at once before [`listen`], while a model is loaded; in [`idle`]
//! it ends the wait, so that the caller can save first.
use anyhow::Context;
#[cfg(unix)]
use nix::sys::termios::{SetArg, Termios, tcgetattr, tcsetattr};
#[cfg(unix)]
use std::fs::File;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError, mpsc};

static INTERRUPTED: AtomicBool = AtomicBool::new(false);
/// Ends the wait of [`idle`], while there is one.
static IDLE: Mutex<Option<Wake>> = Mutex::new(None);
type Wake = Box<dyn FnOnce() + Send>;
/// The terminal settings before line editing changed them.
#[cfg(unix)]
static TERMINAL: Mutex<Option<(File, Termios)>> = Mutex::new(None);

/// From now on [`interrupted`] reports Ctrl-C.
pub fn listen() {
    // This fails only if a handler is installed already; then that one is used.
    let _ = ctrlc::set_handler(|| {
        let again = INTERRUPTED.swap(true, Ordering::SeqCst);
        match set_idle(None) {
            Some(wake) => wake(),
            None if again => std::process::exit(130),
            None => {}
        }
    });
}

fn set_idle(wake: Option<Wake>) -> Option<Wake> {
    std::mem::replace(&mut *IDLE.lock().unwrap_or_else(PoisonError::into_inner), wake)
}

/// Saves the terminal settings; a signal that ends the program in [`idle`] restores them, whatever line editing
/// changed.
pub fn keep_terminal() {
    #[cfg(unix)]
    {
        use std::os::fd::AsFd;
        let device = File::options().read(true).write(true).open("/dev/tty");
        let device = device.or_else(|_| std::io::stdin().as_fd().try_clone_to_owned().map(File::from));
        let kept = device.ok().and_then(|device| tcgetattr(&device).ok().map(|state| (device, state)));
        if let Ok(mut terminal) = TERMINAL.lock() {
            *terminal = kept;
        }
    }
}

fn restore_terminal() {
    #[cfg(unix)]
    if let Ok(mut terminal) = TERMINAL.lock()
        && let Some((mut device, state)) = terminal.take()
    {
        use std::io::Write;
        // A failure cannot be reported here, and the program ends anyway.
        let _ = tcsetattr(&device, SetArg::TCSANOW, &state);
        // Turn bracketed paste off, and let the shell's output begin on a new line.
        let _ = device.write_all(b"\x1b[?2004l\r\n");
    }
}

pub fn interrupted() -> bool {
    INTERRUPTED.load(Ordering::SeqCst)
}

/// Runs `wait`, which blocks without checking [`interrupted`], on a thread of its own. `None` after a Ctrl-C or a signal, also one just
/// before this call, so that it does not affect the next input: the program should end then, and `wait` may still run.
pub fn idle<T: Send + 'static>(wait: impl FnOnce() -> T + Send + 'static) -> anyhow::Result<Option<T>> {
    let (done, waited) = mpsc::channel();
    let ended = done.clone();
    set_idle(Some(Box::new(move || drop(ended.send(None)))));
    let mut result = None;
    if !interrupted() {
        let run = move || drop(done.send(Some(catch_unwind(AssertUnwindSafe(wait)))));
        let thread = std::thread::Builder::new().name("kvist-input".into()).spawn(run);
        thread.context("cannot start a thread that waits for input")?;
        result = waited.recv().ok().flatten();
    }
    set_idle(None);
    match result {
        Some(Ok(result)) => Ok(Some(result)),
        Some(Err(panic)) => resume_unwind(panic),
        None => {
            restore_terminal();
            Ok(None)
        }
    }
}

/// Clears a pending interruption, before the next turn of a chat.
pub fn reset() {
    INTERRUPTED.store(false, Ordering::SeqCst);
}
