//! A proxy before a server of Redis's protocol that can hold what is read, so that a test acts while a read is in flight.
use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

/// Only ends a test that would hang.
const PATIENCE: Duration = Duration::from_secs(600);

/// Passes everything on, and holds commands that read a value while it is told to.
#[derive(Default)]
pub struct Gate {
    /// Whether reads are held, and how many were.
    held: Mutex<(bool, usize)>,
    changed: Condvar,
}

impl Gate {
    /// Listens on a port, which is returned, before the server at `port`. A connection ends with the server's.
    pub fn before(self: &Arc<Self>, port: u16) -> u16 {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let own = listener.local_addr().unwrap().port();
        let gate = self.clone();
        std::thread::spawn(move || {
            for client in listener.incoming().flatten() {
                // Dropped if the server is down.
                if let Ok(server) = TcpStream::connect(("127.0.0.1", port)) {
                    gate.connect(client, server);
                }
            }
        });
        own
    }

    fn connect(self: &Arc<Self>, client: TcpStream, server: TcpStream) {
        let (from_client, to_server) = (client.try_clone().unwrap(), server.try_clone().unwrap());
        let gate = self.clone();
        std::thread::spawn(move || pass(from_client, to_server, |bytes| gate.wait(bytes)));
        std::thread::spawn(move || pass(server, client, |_| ()));
    }

    /// Holds bytes with a command `GET`, from its beginning on.
    fn wait(&self, bytes: &[u8]) {
        let command = b"$3\r\nGET\r\n";
        if !bytes.windows(command.len()).any(|part| part.eq_ignore_ascii_case(command)) {
            return;
        }
        let mut held = self.held.lock().unwrap();
        if held.0 {
            held.1 += 1;
            self.changed.notify_all();
            drop(self.changed.wait_while(held, |held| held.0).unwrap());
        }
    }

    /// From now on lets no read through.
    pub fn hold(&self) {
        *self.held.lock().unwrap() = (true, 0);
    }

    /// Waits until one is held.
    pub fn wait_for_read(&self) {
        let held = self.held.lock().unwrap();
        let (held, waited) = self.changed.wait_timeout_while(held, PATIENCE, |held| held.1 == 0).unwrap();
        drop(held);
        assert!(!waited.timed_out(), "nothing was read within {PATIENCE:?}");
    }

    /// Lets all reads through.
    pub fn open(&self) {
        self.held.lock().unwrap().0 = false;
        self.changed.notify_all();
    }
}

fn pass(mut from: TcpStream, mut to: TcpStream, before: impl Fn(&[u8])) {
    let mut bytes = vec![0; 1 << 16];
    while let Ok(n) = from.read(&mut bytes)
        && n > 0
    {
        before(&bytes[..n]);
        if to.write_all(&bytes[..n]).is_err() {
            break;
        }
    }
    let _ = from.shutdown(Shutdown::Both);
    let _ = to.shutdown(Shutdown::Both);
}
