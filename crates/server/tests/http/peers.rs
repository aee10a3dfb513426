//! What peers may do at the sockets of KV events: be silent, ask whether the server is alive, send garbage.
use crate::fleet::{WireEvent, events_config, prompt, read, replayed};
use crate::server::*;
use serde_json::json;
use std::io::{Read, Write};
use std::net::TcpStream;
use zeromq::{Socket, SocketRecv, SubSocket};

fn greeting() -> [u8; 64] {
    let mut greeting = [0; 64];
    (greeting[0], greeting[9], greeting[10]) = (0xff, 0x7f, 3);
    greeting[12..16].copy_from_slice(b"NULL");
    greeting
}

/// A router that has not heard of an event by then may not be known yet: it is told of another one.
const ASK_AGAIN: std::time::Duration = std::time::Duration::from_millis(20);

/// Peers that connect and say nothing took all places, and no router got one until they went.
#[test]
fn silent_peers_keep_no_router_out() {
    let server = Server::start(events_config());
    let sources = server.get("/kv_event_sources").good()["0"].clone();
    let endpoint = |name: &str| sources[name].as_str().unwrap().to_owned();
    let (events, replays) = (endpoint("endpoint"), endpoint("replay_endpoint"));
    let address = |endpoint: &str| endpoint.strip_prefix("tcp://").unwrap().to_owned();
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let mut first = SubSocket::new();
    runtime.block_on(async {
        first.connect(&events).await.unwrap();
        first.subscribe("").await.unwrap();
    });
    let ask =
        |from: u32| server.post("/v1/completions", &json!({"prompt": prompt(from), "max_tokens": 1})).good();
    // Its subscription is known.
    let mut asked = 0;
    runtime.block_on(async {
        let mut has_heard = false;
        while !has_heard {
            ask(asked);
            asked += 1;
            has_heard = tokio::time::timeout(ASK_AGAIN, first.recv()).await.is_ok();
        }
    });
    let hello = [&greeting()[..], b"\x04\x06\x05READY"].concat();
    let silent: Vec<TcpStream> = (0..200)
        .map(|at| {
            let mut peer = TcpStream::connect(address(if at % 2 == 0 { &events } else { &replays })).unwrap();
            // Some not even greet.
            if at % 4 >= 2 {
                let _ = peer.write_all(&hello);
            }
            peer
        })
        .collect();
    assert!(!runtime.block_on(replayed(&replays, 0)).is_empty());
    let mut second = SubSocket::new();
    runtime.block_on(async {
        second.connect(&events).await.unwrap();
        second.subscribe("").await.unwrap();
        // Both hear what comes now: the first was not silent, so it kept its place.
        let until_heard = async |socket: &mut SubSocket, asked: &mut u32| {
            loop {
                ask(*asked);
                *asked += 1;
                if tokio::time::timeout(ASK_AGAIN, socket.recv()).await.is_ok() {
                    break;
                }
            }
        };
        until_heard(&mut second, &mut asked).await;
        let last = asked - 1;
        let wanted = prompt(last);
        loop {
            let (_, events) = read(first.recv().await.unwrap(), "kv");
            let is_last = |event: &WireEvent| {
                matches!(event, WireEvent::BlockStored { token_ids, .. } if wanted.starts_with(token_ids))
            };
            if events.iter().any(is_last) {
                break;
            }
        }
    });
    drop(silent);
}

/// A consumer with heartbeats, as libzmq sends them, took a socket that does not answer for dead.
#[test]
fn pings_are_answered() {
    let server = Server::start(events_config());
    let sources = server.get("/kv_event_sources").good()["0"].clone();
    for name in ["endpoint", "replay_endpoint"] {
        let mut peer =
            TcpStream::connect(sources[name].as_str().unwrap().strip_prefix("tcp://").unwrap()).unwrap();
        let hello = [&greeting()[..], b"\x04\x06\x05READY"].concat();
        peer.write_all(&hello).unwrap();
        let mut theirs = [0; 66];
        peer.read_exact(&mut theirs).unwrap();
        peer.read_exact(&mut vec![0; theirs[65].into()]).unwrap();
        for context in [&b""[..], b"abcd"] {
            let ping = [&[4, 7 + context.len() as u8][..], b"\x04PING\x00\x0a", context].concat();
            peer.write_all(&ping).unwrap();
            let mut pong = vec![0; 7 + context.len()];
            peer.read_exact(&mut pong).unwrap();
            assert_eq!(pong, [&[4, 5 + context.len() as u8][..], b"\x04PONG", context].concat(), "{name}");
        }
    }
}

/// A peer can send anything to the ports: it costs that peer its connection, and nothing else.
#[test]
fn a_peer_that_sends_garbage_harms_nothing() {
    let server = Server::start(events_config());
    let sources = server.get("/kv_event_sources").good()["0"].clone();
    let (greeting, ready) = (greeting(), b"\x04\x06\x05READY");
    for name in ["endpoint", "replay_endpoint"] {
        let address = sources[name].as_str().unwrap().strip_prefix("tcp://").unwrap().to_string();
        let huge = [&[2][..], &(1u64 << 45).to_be_bytes()].concat();
        for garbage in
            [b"GET / HTTP/1.1\r\n\r\n".to_vec(), huge, vec![0xff; 4096], vec![1, 0, 1, 0, 1, 0, 1, 0]]
        {
            for begun in [&[][..], &greeting[..], &[&greeting[..], ready].concat()] {
                let mut peer = TcpStream::connect(&address).unwrap();
                let _ = peer.write_all(&[begun, &garbage].concat());
                let _ = peer.shutdown(std::net::Shutdown::Write);
                // Until the server has closed it.
                let _ = peer.read_to_end(&mut Vec::new());
            }
        }
    }
    // A peer that asks for replays without end and reads none does not keep another from its own.
    let replays = sources["replay_endpoint"].as_str().unwrap();
    let mut rude = TcpStream::connect(replays.strip_prefix("tcp://").unwrap()).unwrap();
    let request = [&[1, 0, 0, 8][..], &[0; 8]].concat();
    let _ = rude.write_all(&[&greeting[..], ready, &request.repeat(1000)].concat());
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let all = runtime.block_on(replayed(replays, 0));
    assert!(matches!(&all[0].1[..], [WireEvent::AllBlocksCleared]));
    server.get("/health").good();
}
