//! `kvist serve` as a process: killed, terminated, and under many bad clients.

use crate::program::server::{PATIENCE, Server, request};
use crate::program::{self, kvist};
use kvist_testing::SplitMix64;
use serde_json::{Value, json};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

impl Server {
    fn start(args: &[&str]) -> Server {
        Server::spawn(&mut kvist(), &[&["--context", "8192"], args])
    }

    fn get(&self, path: &str) -> (u16, String) {
        self.send("GET", path, "")
    }

    fn complete(&self, body: &Value) -> (u16, String) {
        self.send("POST", "/v1/completions", &body.to_string())
    }

    fn greedy(&self) -> String {
        let (status, text) =
            self.complete(&json!({"prompt": "fn main() {", "max_tokens": 24, "temperature": 0}));
        assert_eq!(status, 200, "{text}");
        let document: Value = serde_json::from_str(&text).unwrap();
        document["choices"][0]["text"].as_str().unwrap().to_string()
    }

    /// A stream of `n` answers of 900 tokens, of which some have come. The rest takes a few minutes, until the server ends.
    fn streaming(&self, n: u32) -> BufReader<TcpStream> {
        let body = json!({
            "prompt": "fn main", "max_tokens": 900, "ignore_eos": true, "temperature": 1, "n": n, "stream": true,
            "stream_options": {"include_usage": true}, "kvist": {"pace": 4},
        });
        let mut reader = BufReader::new(self.ask("POST", "/v1/completions", &body.to_string()));
        let mut events = 0;
        while events < 3 {
            let mut line = String::new();
            assert!(reader.read_line(&mut line).unwrap() > 0, "the stream ended after {events} events");
            events += u32::from(line.starts_with("data: "));
        }
        reader
    }

    fn metric(&self, name: &str) -> f64 {
        let (_, text) = self.get("/metrics");
        let line = text.lines().find(|line| line.starts_with(&format!("{name}{{")));
        let line = line.unwrap_or_else(|| panic!("no {name} in\n{text}"));
        line.rsplit_once(' ').unwrap().1.parse().unwrap()
    }
}

/// The remaining documents of a stream, which must end with `[DONE]`.
fn rest(reader: BufReader<TcpStream>) -> Vec<Value> {
    let mut data: Vec<String> = Vec::new();
    for line in reader.lines() {
        let line = line.unwrap();
        data.extend(line.strip_prefix("data: ").map(str::to_string));
    }
    assert_eq!(data.pop().as_deref(), Some("[DONE]"), "after {} events", data.len());
    data.iter().map(|text| serde_json::from_str(text).unwrap()).collect()
}

#[test]
fn killed_in_mid_stream_it_starts_again_on_the_same_port() {
    let mut server = Server::start(&["--port", "0", "--deterministic"]);
    let before = server.greedy();
    let streams: Vec<_> = (0..4).map(|_| server.streaming(2)).collect();
    server.child.kill().unwrap(); // SIGKILL
    assert!(!server.wait().success());
    for mut stream in streams {
        // The stream breaks off, without the end of a complete answer.
        let mut text = String::new();
        let _ = stream.read_to_string(&mut text);
        assert!(!text.contains("[DONE]"));
    }
    let port = server.address.rsplit_once(':').unwrap().1;
    // Another test may have been given the port meanwhile.
    let again = (0..300).find_map(|_| {
        let args = ["--context", "8192", "--port", port, "--deterministic"];
        Server::try_spawn(&mut kvist(), &[&args]).map_err(|_| std::thread::sleep(Duration::from_secs(1))).ok()
    });
    let mut again = again.expect("the port does not become free");
    assert_eq!(again.address, server.address);
    assert_eq!(again.get("/ready").0, 200);
    assert_eq!(again.metric("kvist_cells_held"), 0.0);
    assert_eq!(again.greedy(), before);
    again.signal("-TERM");
    assert_eq!(again.wait().code(), Some(0));
}

/// That it refuses what comes meanwhile is tested in `kvist-server`, where the engine can be held up.
#[test]
fn told_to_end_it_finishes_what_runs() {
    let mut server = Server::start(&["--port", "0", "--grace", "3600"]);
    let idle = server.connect(); // does not delay the shutdown
    let running = server.streaming(8);
    server.signal("-TERM");
    let events = rest(running);
    let usage = &events.last().unwrap()["usage"];
    assert_eq!(usage["completion_tokens"], 8 * 900, "{usage}");
    assert!(events.iter().all(|event| event.get("error").is_none()));
    assert_eq!(server.wait().code(), Some(0));
    drop(idle);
}

#[test]
fn when_the_grace_is_over_streams_are_told() {
    let mut server = Server::start(&["--port", "0", "--grace", "0.1"]);
    let streams: Vec<_> = (0..2).map(|_| server.streaming(8)).collect();
    server.signal("-TERM");
    for stream in streams {
        let events = rest(stream);
        let error = &events.last().unwrap()["error"];
        assert_eq!(error["code"], "shutting_down", "{:?}", events.last());
        let ended = |event: &&Value| event["choices"][0]["finish_reason"] == "length";
        assert_eq!(events.iter().filter(ended).count(), 8, "every choice ends");
    }
    assert_eq!(server.wait().code(), Some(0));
}

/// One bad client; an unexpected answer is an `Err`.
fn misbehave(server: &Server, random: &mut SplitMix64) -> Result<(), String> {
    let max_tokens = 1 + random.below(32);
    let good = json!({
        "prompt": format!("{} chapter {}", "The borrow checker. ".repeat(20), random.below(4)), "stream": true,
        "max_tokens": max_tokens, "ignore_eos": true, "stream_options": {"include_usage": true},
    });
    let whole = request("POST", "/v1/completions", &good.to_string());
    let told = |expected: &[u16], (status, text): (u16, String)| match expected.contains(&status) {
        true => Ok(text),
        false => Err(format!("{status} where one of {expected:?} was due: {text}")),
    };
    match random.below(6) {
        0 | 1 => {
            let text = told(&[200, 429], server.complete(&good))?;
            let right =
                text.contains("[DONE]") && text.contains(&format!("\"completion_tokens\":{max_tokens},"));
            if !right && !text.contains("queue_full") {
                return Err(format!("a stream of {max_tokens} tokens was {text}"));
            }
        }
        2 => {
            // Disconnects in the middle of the request, or of the answer.
            let mut stream = server.connect();
            let sent = 1 + random.index(whole.len());
            stream.write_all(&whole.as_bytes()[..sent]).map_err(|e| e.to_string())?;
            if sent == whole.len() || random.below(2) == 0 {
                let _ = stream.write_all(&whole.as_bytes()[sent..]);
                let _ = stream.read(&mut vec![0; 1 + random.index(4000)]);
            }
        }
        3 => drop(told(&[400], server.complete(&json!({"prompt": "word ".repeat(3000)})))?),
        4 => {
            let text = good.to_string();
            let cut = &text[..random.index(text.len())];
            told(&[400], server.send("POST", "/v1/completions", cut))?;
        }
        _ => drop(told(&[413], server.send("POST", "/v1/completions", &" ".repeat(700 << 10)))?),
    }
    Ok(())
}

/// A small version of `bench/serve/soak.py`.
#[test]
fn a_crowd_of_bad_clients_leaves_nothing_behind() {
    let flags =
        ["--port", "0", "--deterministic", "--max-queue", "8", "--max-batch", "8", "--max-body", "256KiB"];
    let plan = program::json(&[&["serve", "--context", "8192", "--dry-run", "--json"], &flags[..]].concat());
    let bound = plan["bound"]["total"].as_u64().unwrap();
    let mut server = Server::start(&flags);
    let before = server.greedy();
    let mut bad = Vec::new();
    std::thread::scope(|scope| {
        let server = &server;
        let crowd: Vec<_> = (1..=32u64)
            .map(|seed| {
                scope.spawn(move || {
                    let mut random = SplitMix64(seed);
                    let outcomes = (0..12).map(|_| misbehave(server, &mut random));
                    outcomes
                        .filter_map(Result::err)
                        .map(|what| format!("client {seed}: {what}"))
                        .collect::<Vec<_>>()
                })
            })
            .collect();
        for client in crowd {
            bad.extend(client.join().unwrap());
        }
    });
    assert!(bad.is_empty(), "{}", bad.join("\n"));
    let began = Instant::now();
    let names = ["kvist_cells_held", "vllm:num_requests_running", "vllm:num_requests_waiting"];
    while names.iter().any(|name| server.metric(name) != 0.0) {
        assert!(began.elapsed() < PATIENCE, "{}", server.get("/metrics").1);
        std::thread::sleep(Duration::from_millis(20));
    }
    assert_eq!(server.metric("kvist_failed_steps_total"), 0.0);
    assert_eq!(server.greedy(), before);
    #[cfg(target_os = "linux")]
    {
        let status = std::fs::read_to_string(format!("/proc/{}/status", server.child.id())).unwrap();
        let peak = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
        let peak = peak.trim().trim_end_matches(" kB").parse::<u64>().unwrap() << 10;
        // Not part of the bound: the program itself, the tokenizer, connections.
        assert!(peak < bound + (96 << 20), "{peak} bytes were resident; the bound is {bound}");
    }
    server.signal("-TERM");
    assert_eq!(server.wait().code(), Some(0));
}
