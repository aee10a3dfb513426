use super::*;
use tokio::io::AsyncReadExt;

fn kept(most: usize) -> Kept {
    Kept { messages: VecDeque::new(), bytes: 0, most, content: None }
}

#[test]
fn the_newest_messages_are_kept() {
    let mut kept = kept(3);
    assert!(kept.from(0).is_none());
    for number in 0..5 {
        kept.push(number, vec![number as u8].into());
    }
    let mut numbers = Vec::new();
    let mut next = 0;
    while let Some((number, payload)) = kept.from(next) {
        assert_eq!(payload[..], [number as u8]);
        numbers.push(number);
        next = number + 1;
    }
    assert_eq!(numbers, [2, 3, 4]);
}

/// Large messages do not fill the memory, whatever their number.
#[test]
fn kept_bytes_are_bounded() {
    let mut kept = kept(usize::MAX);
    let payload: Bytes = vec![0; MAX_KEPT_BYTES / 4].into();
    for number in 0..9 {
        kept.push(number, payload.clone());
    }
    assert_eq!((kept.messages.len(), kept.bytes), (4, MAX_KEPT_BYTES));
    assert_eq!(kept.from(0).map(|(number, _)| number), Some(5));
    assert!(kept.from(9).is_none() && kept.from(u64::MAX).is_none());
}

/// The content is there as long as what comes after it.
#[test]
fn content_is_kept_with_the_messages_after_it() {
    let mut kept = kept(3);
    (0..5).for_each(|number| kept.push(number, Bytes::new()));
    let content = Content { until: 4, payloads: Vec::new() };
    kept.content = Some(content.clone());
    kept.push(5, Bytes::new());
    kept.push(6, Bytes::new());
    assert_eq!((kept.oldest(7), kept.content.clone()), (4, Some(content)));
    kept.push(7, Bytes::new());
    assert_eq!((kept.oldest(8), kept.content), (5, None));
}

/// vllm-router drops a message that is too long for it, with all that is in it.
#[test]
fn messages_are_short_enough_for_consumers() {
    let removed = |n: u64, hashes: usize| Event::BlockRemoved {
        block_hashes: vec![n; hashes],
        medium: super::super::wire::Medium::Cache,
    };
    let events: Vec<Event> = (0..MAX_EVENTS as u64 * 2 + 50).map(|n| removed(n, 1)).collect();
    let publisher = Publisher::new("", 10);
    publisher.publish(&events);
    assert_eq!(publisher.n_messages(), 3);
    // Their order is kept, whatever the parts are; payloads contain the time, so lengths are compared.
    let payloads = batches(&events);
    let overhead = batch(&[]).unwrap().len() + 2; // an array of many has a longer head
    let whole: usize = payloads.iter().map(|payload| payload.len() - overhead).sum();
    assert_eq!(whole, batch(&events).unwrap().len() - overhead);
    // Nine bytes a hash.
    let long: Vec<Event> = (0..4).map(|n| removed(u64::MAX - n, MAX_BYTES / 9 / 2)).collect();
    assert!(batches(&long).len() >= 2 && batches(&long).iter().all(|payload| payload.len() <= MAX_BYTES));
    assert_eq!((batches(&[]).len(), batches(&[removed(0, MAX_BYTES)]).len()), (1, 1));
}

/// A replay of what was lost asks for the content once, however many ask.
#[tokio::test]
async fn lost_messages_are_replaced_by_the_content() {
    let publisher = Publisher::new("", 3);
    let asked = Arc::new(std::sync::atomic::AtomicU64::new(0));
    let ask: AskContent = {
        let (publisher, asked) = (publisher.clone(), asked.clone());
        Arc::new(move || {
            asked.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
            let content = publisher.content(&[]);
            Box::pin(async move {
                tokio::task::yield_now().await;
                Some((content, Duration::ZERO))
            })
        })
    };
    (0..3).for_each(|_| publisher.publish(&[]));
    assert_eq!(publisher.log.content(0, &ask).await, None, "all are kept");
    publisher.publish(&[]);
    let both = tokio::join!(publisher.log.content(0, &ask), publisher.log.content(0, &ask));
    assert_eq!(both.0.as_ref().map(|content| content.until), Some(4));
    assert_eq!((both.0 == both.1, asked.load(std::sync::atomic::Ordering::Relaxed)), (true, 1));
    assert_eq!(publisher.log.content(1, &ask).await, None);
}

/// The frames of a message. [`zmtp::read`] takes no more than a consumer sends.
async fn frames(reader: &mut (impl AsyncReadExt + Unpin)) -> Vec<Vec<u8>> {
    const MORE: u8 = 1;
    const LONG: u8 = 2;
    let mut frames = Vec::new();
    loop {
        let flags = reader.read_u8().await.unwrap();
        let length = match flags & LONG {
            0 => u64::from(reader.read_u8().await.unwrap()),
            _ => reader.read_u64().await.unwrap(),
        };
        let mut body = vec![0; length as usize];
        reader.read_exact(&mut body).await.unwrap();
        frames.push(body);
        if flags & MORE == 0 {
            return frames;
        }
    }
}

/// Regression: a router that started after a worker had published a million messages got none of what the cache had, for ever.
#[tokio::test]
async fn a_replay_begins_with_the_content_however_much_is_lost() {
    for n_before in [0, 1, 5, MAX_EMPTY - 2, u64::MAX / 2] {
        let publisher = Publisher::new("topic", 2);
        publisher.log.next.send_modify(|next| *next = n_before);
        (0..3).for_each(|_| publisher.publish(&[]));
        let ask: AskContent = {
            let publisher = publisher.clone();
            Arc::new(move || {
                let content = publisher.content(&[]);
                Box::pin(async move { Some((content, Duration::ZERO)) })
            })
        };
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let (client, server) = tokio::join!(TcpStream::connect(address), listener.accept());
        let (reader, _writer) = client.unwrap().into_split();
        let mut reader = tokio::io::BufReader::new(reader);
        let (_reader, mut writer) = server.unwrap().0.into_split();
        let read = async {
            let mut numbers = Vec::new();
            loop {
                let [_, topic, number, payload] = frames(&mut reader).await.try_into().unwrap();
                if number == END {
                    return numbers;
                }
                assert_eq!(topic, b"topic");
                numbers.push((u64::from_be_bytes(number.try_into().unwrap()), payload.len()));
            }
        };
        let (replayed, numbers) = tokio::join!(replay(&mut writer, &publisher.log, 0, &ask), read);
        replayed.unwrap();
        // The content, and then empty batches, or none if they are too many.
        let until = n_before + 3;
        let empty = if until - 1 <= MAX_EMPTY { 1..until } else { until..until };
        assert!(numbers[0].0 == 0 && numbers[0].1 > 0, "{n_before}: {:?}", numbers[0]);
        assert!(numbers[1..].iter().map(|(number, _)| *number).eq(empty), "{n_before}");
    }
}

/// The content was asked for when there were more numbers before it, for one that lacks many messages. One that lacks few of them was told
/// to forget everything, and then the first part of what there is.
#[tokio::test]
async fn content_that_does_not_fit_any_more_is_asked_for_again() {
    let publisher = Publisher::new("", 2);
    let ask: AskContent = {
        let publisher = publisher.clone();
        Arc::new(move || {
            let content = Content { until: publisher.n_messages(), payloads: vec![Bytes::new(); 3] };
            Box::pin(async move { Some((content, Duration::ZERO)) })
        })
    };
    let until = async |from: u64| publisher.log.content(from, &ask).await.map(|content| content.until);
    (0..6).for_each(|_| publisher.publish(&[]));
    assert_eq!(until(0).await, Some(6));
    (0..2).for_each(|_| publisher.publish(&[]));
    // Messages 6 and 7 are kept.
    assert_eq!(until(3).await, Some(6), "three numbers for three messages");
    assert_eq!(until(5).await, Some(8), "one number is too few");
    assert_eq!(until(5).await, Some(8));
}

/// Any peer may ask for replays without end: the engine tells the content no more often than it can spare.
#[tokio::test(start_paused = true)]
async fn the_engine_is_left_alone_between_two_contents() {
    let publisher = Publisher::new("", 1);
    let ask: AskContent = {
        let publisher = publisher.clone();
        Arc::new(move || {
            let content = publisher.content(&[]);
            Box::pin(async move { Some((content, Duration::from_millis(100))) })
        })
    };
    let start = Instant::now();
    for round in 0..5 {
        (0..2).for_each(|_| publisher.publish(&[]));
        let both = tokio::join!(publisher.log.content(0, &ask), publisher.log.content(0, &ask));
        assert!(both.0.is_some() && both.1.is_some());
        assert_eq!(start.elapsed(), round * Duration::from_secs(2), "round {round}");
    }
}

#[test]
fn other_requests_are_ignored() {
    let message = |frames: &[&[u8]]| Received::Message(frames.iter().map(|frame| frame.to_vec()).collect());
    let number = 7u64.to_be_bytes();
    assert_eq!(asked(message(&[b"", &number])), Some(7));
    for other in [&[&b""[..], b"7"][..], &[b"x", &number], &[&number], &[b"", &number, b""]] {
        assert_eq!(asked(message(other)), None);
    }
    assert_eq!(asked(Received::Command(number.to_vec())), None);
}
