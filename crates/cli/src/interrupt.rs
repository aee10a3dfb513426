//! Ctrl-C, or a termination signal, ends the work at the next token, with the summary; a second one ends the program.
//! When nothing is being computed the first one ends the program: before [`listen`], while a model is loaded, and in
//! [`idle`].
#[cfg(unix)]
use nix::sys::termios::{SetArg, Termios, tcgetattr, tcsetattr};
#[cfg(unix)]
use std::fs::File;
#[cfg(unix)]
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

static INTERRUPTED: AtomicBool = AtomicBool::new(false);
static IDLE: AtomicBool = AtomicBool::new(false);
/// The terminal settings before line editing changed them.
#[cfg(unix)]
static TERMINAL: Mutex<Option<(File, Termios)>> = Mutex::new(None);

/// From now on [`interrupted`] reports Ctrl-C.
pub fn listen() {
    // This fails only if a handler is installed already; then that one is used.
    let _ = ctrlc::set_handler(|| {
        if INTERRUPTED.swap(true, Ordering::SeqCst) || IDLE.load(Ordering::SeqCst) {
            if IDLE.load(Ordering::SeqCst) {
                restore_terminal();
            }
            std::process::exit(130);
        }
    });
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

/// Runs `wait`, which blocks without checking [`interrupted`]. Meanwhile the first Ctrl-C ends the program.
pub fn idle<T>(wait: impl FnOnce() -> T) -> T {
    IDLE.store(true, Ordering::SeqCst);
    // A Ctrl-C just before this call ends the program too, so that it does not affect the next input.
    if interrupted() {
        std::process::exit(130);
    }
    let result = wait();
    IDLE.store(false, Ordering::SeqCst);
    result
}

/// Clears a pending interruption, before the next turn of a chat.
pub fn reset() {
    INTERRUPTED.store(false, Ordering::SeqCst);
}
