//! A running `kvist serve`, and requests to it.
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::process::{Child, ChildStdout, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

/// Not a criterion: it only ends a test that would hang.
pub const PATIENCE: Duration = Duration::from_secs(600);

pub struct Server {
    pub child: Child,
    pub address: String,
    /// Kept open, because the server writes to its stdout.
    _stdout: BufReader<ChildStdout>,
}

impl Server {
    /// Starts `kvist serve` with the environment and stderr of `command`; returns once it listens.
    pub fn spawn(command: &mut Command, args: &[&[&str]]) -> Server {
        Self::try_spawn(command, args).unwrap_or_else(|ended| panic!("{ended}"))
    }

    /// Like [`spawn`](Self::spawn). `Err` if the program ends before it listens.
    pub fn try_spawn(command: &mut Command, args: &[&[&str]]) -> Result<Server, String> {
        command.args(["serve", "--quiet"]).args(args.concat()).stdout(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let mut stdout = BufReader::new(child.stdout.take().unwrap());
        let mut line = String::new();
        stdout.read_line(&mut line).unwrap();
        let address = line.trim_end().rsplit_once("http://");
        let Some((_, address)) = address else { return Err(format!("{line:?}, then {:?}", child.wait())) };
        Ok(Server { child, address: address.to_string(), _stdout: stdout })
    }

    pub fn signal(&self, name: &str) {
        let pid = self.child.id().to_string();
        assert!(Command::new("kill").args([name, &pid]).status().unwrap().success());
    }

    /// Waits for the process to end.
    pub fn wait(&mut self) -> ExitStatus {
        let began = Instant::now();
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                return status;
            }
            assert!(began.elapsed() < PATIENCE, "the server still runs after {PATIENCE:?}");
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    pub fn connect(&self) -> TcpStream {
        let stream = TcpStream::connect(&self.address).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        stream
    }

    /// Sends a request; the answer comes through the stream.
    pub fn ask(&self, method: &str, path: &str, body: &str) -> TcpStream {
        let mut stream = self.connect();
        stream.write_all(request(method, path, body).as_bytes()).unwrap();
        stream
    }

    /// Returns the status, and everything after the headers.
    pub fn send(&self, method: &str, path: &str, body: &str) -> (u16, String) {
        answer(self.ask(method, path, body))
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // A failed test cannot do anything else here.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

pub fn request(method: &str, path: &str, body: &str) -> String {
    let n = body.len();
    format!(
        "{method} {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-type: application/json\r\n\
         content-length: {n}\r\n\r\n{body}"
    )
}

pub fn answer(mut stream: TcpStream) -> (u16, String) {
    let mut bytes = Vec::new();
    let end = stream.read_to_end(&mut bytes);
    let text = String::from_utf8_lossy(&bytes);
    let (head, body) = text.split_once("\r\n\r\n").unwrap_or_else(|| panic!("{end:?}: {text:?}"));
    let status = head.split(' ').nth(1).and_then(|status| status.parse().ok());
    (status.unwrap_or_else(|| panic!("no status: {head}")), body.to_string())
}
