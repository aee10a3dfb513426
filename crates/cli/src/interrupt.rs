//! Ctrl-C, or a termination, ends the work at the next token, with the summary; a second one ends the program. Where
//! nothing is being computed the first one does: before [`listen`], while a model is loaded, and in [`idle`].
#[cfg(unix)]
use nix::sys::termios::{SetArg, Termios, tcgetattr, tcsetattr};
#[cfg(unix)]
use std::fs::File;
#[cfg(unix)]
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

static INTERRUPTED: AtomicBool = AtomicBool::new(false);
static IDLE: AtomicBool = AtomicBool::new(false);
/// The terminal as it was before lines were edited at it.
#[cfg(unix)]
static TERMINAL: Mutex<Option<(File, Termios)>> = Mutex::new(None);

/// From here on Ctrl-C is heard by [`interrupted`].
pub fn listen() {
    // It can only fail if a handler stands already; then that one serves.
    let _ = ctrlc::set_handler(|| {
        if INTERRUPTED.swap(true, Ordering::SeqCst) || IDLE.load(Ordering::SeqCst) {
            if IDLE.load(Ordering::SeqCst) {
                restore_terminal();
            }
            std::process::exit(130);
        }
    });
}

/// A signal that ends the program in [`idle`] leaves the terminal as it is now, whatever line editing makes of it.
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
        // There is no place to report a failure, and the program ends.
        let _ = tcsetattr(&device, SetArg::TCSANOW, &state);
        // Bracketed paste off; what the shell writes next begins a line.
        let _ = device.write_all(b"\x1b[?2004l\r\n");
    }
}

pub fn interrupted() -> bool {
    INTERRUPTED.load(Ordering::SeqCst)
}

/// Wait for something that no flag could end.
pub fn idle<T>(wait: impl FnOnce() -> T) -> T {
    IDLE.store(true, Ordering::SeqCst);
    // One that came a moment ago was not meant for what is read next.
    if interrupted() {
        std::process::exit(130);
    }
    let result = wait();
    IDLE.store(false, Ordering::SeqCst);
    result
}

/// Forget an interruption: the next turn of a chat starts unburdened.
pub fn reset() {
    INTERRUPTED.store(false, Ordering::SeqCst);
}
