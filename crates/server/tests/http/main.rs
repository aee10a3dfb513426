//! The server over real connections: answers, streams, refusals, limits, keys, and clients that go away.
mod answers;
mod bodies;
mod costly;
mod doors;
mod harmony;
mod limits;
mod live;
mod refusals;
mod scores;
mod server;
mod tools;
mod words;
