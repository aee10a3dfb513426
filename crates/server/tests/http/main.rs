//! The server over real connections: answers, streams, refusals, limits, keys, and clients that go away.
mod answers;
mod limits;
mod live;
mod refusals;
mod server;
