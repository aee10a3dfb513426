//! Servers that keep blocks, for tests of stores and of what uses them.
use std::collections::HashMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex};

/// A Redis or Valkey of its own, with the password `secret`, that stores nothing on disk. Killed when it is dropped.
pub struct Redis {
    port: u16,
    process: Child,
}

impl Drop for Redis {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

impl Redis {
    /// The installed server. `KVIST_REQUIRE_REDIS=1` makes a missing one an error.
    fn program() -> Option<&'static str> {
        let runs = |name: &&str| Command::new(name).arg("--version").stdout(Stdio::null()).status().is_ok();
        let found = ["redis-server", "valkey-server"].into_iter().find(runs);
        if found.is_none() {
            assert!(
                std::env::var_os("KVIST_REQUIRE_REDIS").is_none(),
                "neither redis-server nor valkey-server is here"
            );
            eprintln!("skipped: neither redis-server nor valkey-server is here");
        }
        found
    }

    /// `None` if it ends: another process may have the port.
    fn start(program: &str, port: u16) -> Option<Redis> {
        let port_text = port.to_string();
        let mut process = Command::new(program)
            .args(["--port", &port_text, "--bind", "127.0.0.1", "--save", "", "--daemonize", "no"])
            .args(["--requirepass", "secret", "--dir"])
            .arg(std::env::temp_dir())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(process.stdout.take().unwrap()).lines();
        let ready =
            lines.find(|line| line.as_ref().is_ok_and(|line| line.contains("Ready to accept connections")));
        let redis = Redis { port, process };
        ready?.ok()?;
        // It must not wait for a reader of its log.
        std::thread::spawn(move || lines.for_each(drop));
        Some(redis)
    }

    /// `None` if neither server is installed.
    pub fn new() -> Option<Redis> {
        let program = Redis::program()?;
        let free = || TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let started = (0..100).find_map(|_| Redis::start(program, free()));
        Some(started.unwrap_or_else(|| panic!("{program} ends at once")))
    }

    /// Kills the server, with all that it has. It can be [started again](Self::again) on the same port.
    pub fn kill(self) -> u16 {
        self.port
    }

    pub fn again(port: u16) -> Option<Redis> {
        let program = Redis::program()?;
        // While the port was free, a client of another server may have got it.
        let started = (0..300).find_map(|_| {
            let started = Redis::start(program, port);
            if started.is_none() {
                std::thread::sleep(std::time::Duration::from_secs(1));
            }
            started
        });
        Some(started.unwrap_or_else(|| panic!("{program} ends at once on port {port}")))
    }

    /// Host and port.
    pub fn address(&self) -> String {
        format!("127.0.0.1:{}", self.port)
    }

    /// From now on it refuses to write beyond so many bytes, as one with `maxmemory` that evicts nothing; 0 for any number.
    pub fn bound(&self, bytes: u64) {
        let mut stream = TcpStream::connect(self.address()).unwrap();
        let set = "CONFIG SET maxmemory";
        let commands = format!("AUTH secret\r\n{set}-policy noeviction\r\n{set} {bytes}\r\n");
        stream.write_all(commands.as_bytes()).unwrap();
        let mut lines = BufReader::new(stream).lines();
        for _ in 0..3 {
            assert_eq!(lines.next().unwrap().unwrap(), "+OK");
        }
    }

    pub fn port(&self) -> u16 {
        self.port
    }

    pub fn url(&self, rest: &str) -> String {
        format!("redis://:secret@{}/{rest}", self.address())
    }
}

/// As much of S3 as a store of blocks uses, and what may go wrong with it: every n-th answer is an error, or ends early.
#[derive(Default)]
pub struct S3 {
    objects: Mutex<HashMap<String, Vec<u8>>>,
    pub requests: AtomicUsize,
    /// 0 for never.
    pub error_every: AtomicUsize,
    pub short_every: AtomicUsize,
    heads: Heads,
    gets: Gets,
    is_down: AtomicBool,
}

/// GET requests, which read an object.
#[derive(Default)]
struct Gets {
    /// Whether they are held, and how many are.
    held: Mutex<(bool, usize)>,
    changed: Condvar,
}

impl Gets {
    fn arrive(&self) {
        let mut held = self.held.lock().unwrap();
        if held.0 {
            held.1 += 1;
            self.changed.notify_all();
            drop(self.changed.wait_while(held, |held| held.0).unwrap());
        }
    }
}

/// HEAD requests, which ask whether an object is there.
#[derive(Default)]
struct Heads {
    counts: Mutex<HeadCounts>,
    arrived: Condvar,
}

#[derive(Default)]
struct HeadCounts {
    arrived: usize,
    /// The first ones that are answered at once, and how many have to arrive until another is.
    at_once: usize,
    wanted: usize,
}

impl Heads {
    fn arrive(&self) {
        let mut counts = self.counts.lock().unwrap();
        counts.arrived += 1;
        self.arrived.notify_all();
        if counts.arrived > counts.at_once {
            drop(self.arrived.wait_while(counts, |counts| counts.arrived < counts.wanted).unwrap());
        }
    }
}

impl S3 {
    /// From now on answers so many HEAD requests, and then none before `more` have arrived.
    pub fn hold_heads(&self, at_once: usize, more: usize) {
        let mut counts = self.heads.counts.lock().unwrap();
        *counts = HeadCounts { arrived: 0, at_once, wanted: at_once + more };
    }

    /// From now on answers no GET request.
    pub fn hold_gets(&self) {
        *self.gets.held.lock().unwrap() = (true, 0);
    }

    /// Waits until one is held.
    pub fn wait_for_get(&self) {
        let held = self.gets.held.lock().unwrap();
        let patience = std::time::Duration::from_secs(300);
        let held = self.gets.changed.wait_timeout_while(held, patience, |held| held.1 == 0).unwrap();
        assert!(!held.1.timed_out(), "nothing is read");
    }

    /// Loses all objects, and answers nothing any more: connections end, those of held requests too.
    pub fn kill(&self) {
        self.is_down.store(true, Ordering::SeqCst);
        self.objects.lock().unwrap().clear();
        self.gets.held.lock().unwrap().0 = false;
        self.gets.changed.notify_all();
    }

    /// Answers again.
    pub fn again(&self) {
        self.is_down.store(false, Ordering::SeqCst);
    }

    /// Serves until the test process ends. Returns the URL of a bucket.
    pub fn start(self: &Arc<Self>) -> String {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let s3 = self.clone();
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let s3 = s3.clone();
                std::thread::spawn(move || while s3.answer(stream.as_ref().unwrap()).is_some() {});
            }
        });
        format!(
            "s3://bucket/prefix?endpoint=http%3A%2F%2F127.0.0.1%3A{port}&region=here&access_key_id=me\
             &secret_access_key=secret&disable_config_load=true&disable_ec2_metadata=true"
        )
    }

    fn answer(&self, stream: &TcpStream) -> Option<()> {
        let mut reader = BufReader::new(stream);
        let mut line = String::new();
        reader.read_line(&mut line).ok().filter(|bytes| *bytes > 0)?;
        let mut words = line.split(' ');
        let (method, path) = (words.next()?.to_owned(), words.next()?.to_owned());
        let (mut length, mut signed) = (0, false);
        loop {
            let mut header = String::new();
            reader.read_line(&mut header).ok()?;
            let Some((name, value)) = header.split_once(':') else { break };
            match name.to_ascii_lowercase().as_str() {
                "content-length" => length = value.trim().parse().ok()?,
                "authorization" => signed = value.contains("AWS4-HMAC-SHA256 Credential=me/"),
                _ => {}
            }
        }
        let mut body = vec![0; length];
        reader.read_exact(&mut body).ok()?;
        let request = self.requests.fetch_add(1, Ordering::SeqCst) + 1;
        let every = |n: &AtomicUsize| {
            request.is_multiple_of(n.load(Ordering::SeqCst).max(1)) && n.load(Ordering::SeqCst) > 0
        };
        if method == "HEAD" {
            self.heads.arrive();
        }
        if method == "GET" {
            self.gets.arrive();
        }
        if self.is_down.load(Ordering::SeqCst) {
            return None;
        }
        let mut objects = self.objects.lock().unwrap();
        let (status, body) = match method.as_str() {
            _ if !signed || !path.starts_with("/bucket/prefix/") => ("403 Forbidden", vec![]),
            _ if every(&self.error_every) => ("503 Slow Down", vec![]),
            "PUT" => {
                objects.insert(path, body);
                ("200 OK", vec![])
            }
            "DELETE" => {
                objects.remove(&path);
                ("204 No Content", vec![])
            }
            "GET" | "HEAD" => match objects.get(&path) {
                Some(object) => ("200 OK", object.clone()),
                None => ("404 Not Found", vec![]),
            },
            _ => ("400 Bad Request", vec![]),
        };
        let mut stream = stream;
        let head = format!("HTTP/1.1 {status}\r\nContent-Length: {}\r\nETag: \"x\"\r\n\r\n", body.len());
        let body = if method == "HEAD" { &[][..] } else { &body[..] };
        let short = every(&self.short_every) && method == "GET";
        let body = if short { &body[..body.len() / 2] } else { body };
        stream.write_all(head.as_bytes()).ok()?;
        stream.write_all(body).ok()?;
        (!short).then_some(())
    }
}
