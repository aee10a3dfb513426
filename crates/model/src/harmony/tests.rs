//! Answers as the model writes them, with mistakes as the model makes them, and cut at any place.
use super::*;

fn answer(reasoning: &str, content: &str, calls: &[(&str, &str)]) -> Answer {
    let calls = calls.iter().map(|(name, arguments)| (name.to_string(), arguments.to_string())).collect();
    Answer { content: content.into(), reasoning: reasoning.into(), calls }
}

fn cut(pieces: &[&str], calls: bool) -> Answer {
    let (mut parser, mut out) = (ChannelParser::new(calls), Vec::new());
    pieces.iter().for_each(|piece| parser.push(piece, &mut out));
    parser.finish(&mut out);
    out.into_iter().collect()
}

/// (answer, reasoning, content, calls)
type Row = (&'static str, &'static str, &'static str, &'static [(&'static str, &'static str)]);
const TABLE: &[Row] = &[
    ("", "", "", &[]),
    ("<|channel|>final<|message|>Hello.", "", "Hello.", &[]),
    (
        "<|channel|>analysis<|message|>A greeting.<|end|><|start|>assistant<|channel|>final<|message|>Hello, 1 < 2.<|return|>",
        "A greeting.",
        "Hello, 1 < 2.",
        &[],
    ),
    // A call with its recipient after the channel, and in the role, as the template writes it.
    (
        "<|channel|>analysis<|message|>Look.<|end|><|start|>assistant<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{\"in\": \"Rome\"}<|call|>",
        "Look.",
        "",
        &[("get_weather", "{\"in\": \"Rome\"}")],
    ),
    (" to=functions.f<|channel|>commentary json<|message|>{}", "", "", &[("f", "{}")]),
    (
        "<|channel|>commentary to=functions.a.b<|message|> {\"x\": \"<|\"}\n",
        "",
        "",
        &[("a.b", "{\"x\": \"<|\"}")],
    ),
    ("<|channel|>analysis to=functions.f code<|message|>{}<|call|>", "", "", &[("f", "{}")]),
    ("<|channel|>commentary<|constrain|>json to=functions.f<|message|>{}<|call|>", "", "", &[("f", "{}")]),
    // Several calls, and text before them.
    (
        "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant to=functions.f<|channel|>commentary <|constrain|>json<|message|>{\"a\": 1}<|call|><|start|>assistant<|channel|>commentary to=functions.g <|constrain|>json<|message|>{}<|call|>",
        "",
        "I look.",
        &[("f", "{\"a\": 1}"), ("g", "{}")],
    ),
    // Messages of one channel are kept apart.
    (
        "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>analysis<|message|>b<|end|><|start|>assistant<|channel|>commentary<|message|>c<|end|><|start|>assistant<|channel|>final<|message|><|end|><|start|>assistant<|channel|>final<|message|>d",
        "a\nb",
        "c\nd",
        &[],
    ),
    // Structured output.
    ("<|channel|>final <|constrain|>json<|message|>{\"a\": [1]}<|return|>", "", "{\"a\": [1]}", &[]),
    ("<|channel|>final json<|message|>{}", "", "{}", &[]),
    // Truncated anywhere.
    ("<|channel|>", "", "", &[]),
    ("<|channel|>ana", "", "", &[]),
    ("<|channel|>analysis", "", "", &[]),
    ("<|channel|>analysis<|message|>I thi", "I thi", "", &[]),
    ("<|channel|>analysis<|message|>a<|end|><|start|>assist", "a", "", &[]),
    ("<|channel|>commentary t", "", "", &[]),
    ("<|channel|>commentary to=functions.get_wea", "", "", &[]),
    ("<|channel|>commentary to=functions.f <|constrain|>js", "", "", &[]),
    ("<|channel|>commentary to=functions.f js", "", "", &[]),
    (" to=functions.f<|channel|>", "", "", &[]),
    ("<|channel|>commentary to=functions.f<|message|>", "", "", &[]),
    // An incomplete call is text, and so is one without an object, or to another recipient.
    ("<|channel|>commentary to=functions.f<|message|>{\"a\": \"R", "", "{\"a\": \"R", &[]),
    ("<|channel|>commentary to=functions.f<|message|>f(1)<|call|>", "", "f(1)", &[]),
    ("<|channel|>commentary to=functions.f<|message|>{\"a\"}<|call|>", "", "{\"a\"}", &[]),
    ("<|channel|>commentary to=functions.<|message|>{}<|call|>", "", "{}", &[]),
    ("<|channel|>commentary to=python code<|message|>print(1)<|call|>", "", "print(1)", &[]),
    ("<|channel|>analysis to=python code<|message|>print(1)<|call|>", "print(1)", "", &[]),
    // No channels.
    ("Hello.", "", "Hello.", &[]),
    (" \n", "", " \n", &[]),
    ("\nHello <b>", "", "\nHello <b>", &[]),
    ("assistant", "", "assistant", &[]),
    ("assistants help", "", "assistants help", &[]),
    ("assistant hello", "", "assistant hello", &[]),
    ("to be", "", "to be", &[]),
    ("<|chan", "", "<|chan", &[]),
    ("Hi <|channel|>analysis<|message|>hm", "hm", "Hi ", &[]),
    ("<|message|>Hi", "", "Hi", &[]),
    // Marks that are missing or misplaced.
    ("<|channel|>finalHello there<|return|>", "", "Hello there", &[]),
    ("<|channel|>final Hello there", "", "Hello there", &[]),
    ("<|channel|>analysisHm.<|end|><|start|>assistant<|channel|>final<|message|>Hi", "Hm.", "Hi", &[]),
    ("<|channel|>commentary to=functions.f {\"a\": 1}<|call|>", "", "", &[("f", "{\"a\": 1}")]),
    ("<|channel|>analysis<|message|>a<|channel|>final<|message|>b", "a", "b", &[]),
    ("<|channel|>analysis<|message|>a<|start|>assistant<|channel|>final<|message|>b", "a", "b", &[]),
    ("<|channel|>analysis<|message|>a<|end|>\n<|channel|>final<|message|>b<|end|>\n", "a", "b", &[]),
    ("<|channel|>analysis<|message|>a<|end|>So b.", "a", "So b.", &[]),
    ("<|channel|>analysis<|message|>a<|end|>assistant<|channel|>final<|message|>b", "a", "b", &[]),
    (
        "<|channel|>commentary<|channel|>commentary to=functions.f<|message|>{}<|call|>",
        "",
        "",
        &[("f", "{}")],
    ),
    ("<|channel|>final<|message|>a <|message|> b", "", "a <|message|> b", &[]),
    ("<|channel|>musings<|message|>a", "", "a", &[]),
    ("<|start|>user<|message|>Why?<|end|>", "", "Why?", &[]),
    ("<|start|>Why do you ask?", "", "Why do you ask?", &[]),
    ("<|channel|><|channel|><|end|><|end|><|start|><|start|><|message|><|call|><|return|>", "", "", &[]),
];

#[test]
fn answers_are_taken_apart() {
    for (text, reasoning, content, calls) in TABLE {
        assert_eq!(Answer::read(text, true), answer(reasoning, content, calls), "{text}");
    }
}

#[test]
fn without_functions_a_call_is_text() {
    let text = "<|channel|>analysis<|message|>a<|end|><|start|>assistant to=functions.f<|channel|>commentary<|message|>{\"b\": 1}<|call|>";
    assert_eq!(Answer::read(text, false), answer("a", "{\"b\": 1}", &[]));
    for (text, ..) in TABLE {
        assert!(Answer::read(text, false).calls.is_empty());
    }
}

#[test]
fn cuts_change_nothing() {
    for (text, ..) in TABLE {
        let whole = Answer::read(text, true);
        let letters: Vec<String> = text.chars().map(String::from).collect();
        let letters: Vec<&str> = letters.iter().map(String::as_str).collect();
        assert_eq!(cut(&letters, true), whole, "by letters: {text}");
        for at in (0..text.len()).filter(|at| text.is_char_boundary(*at)) {
            let (a, b) = text.split_at(at);
            assert_eq!(cut(&[a, b], true), whole, "at {at}: {text}");
            assert_eq!(cut(&[a, "", b], true), whole, "at {at}: {text}");
        }
    }
}

/// Parses a whole text by its marks alone. Handles answers in which every message has its header, and reports that it
/// does not handle others.
fn twin(text: &str) -> Option<Answer> {
    let mut answer = Answer::default();
    let mut said: [Vec<String>; 2] = Default::default();
    for (n, message) in text.split(START).enumerate() {
        let message = if n == 0 { message } else { message.strip_prefix("assistant")? };
        let (header, body) = message.split_once(MESSAGE)?;
        let end = [END, RETURN, CALL].into_iter().find_map(|end| body.strip_suffix(end));
        let body = end?;
        let (role, channel) = header.split_once(CHANNEL)?;
        if MARKS.iter().any(|mark| body.contains(mark))
            || [START, END, RETURN, CALL, CHANNEL].iter().any(|m| channel.contains(m))
        {
            return None;
        }
        let words: Vec<&str> = channel.split(CONSTRAIN).next()?.split_whitespace().collect();
        let name = words.first()?;
        let recipient = role
            .split_whitespace()
            .chain(words[1..].iter().copied())
            .find_map(|word| word.strip_prefix("to="));
        let known = ["analysis", "commentary", "final"].contains(name);
        if !known || words.len() > 2 || role.contains('<') || !(role.is_empty() || role.starts_with(" to=")) {
            return None;
        }
        match recipient.and_then(|to| to.strip_prefix("functions.")) {
            Some(function)
                if serde_json::from_str::<serde_json::Map<String, serde_json::Value>>(body).is_ok() =>
            {
                answer.calls.push((function.into(), body.trim().into()));
            }
            _ if body.is_empty() => {}
            _ => said[usize::from(*name == "analysis")].push(body.into()),
        }
    }
    let [content, reasoning] = said.map(|said| said.join("\n"));
    Some(Answer { content, reasoning, ..answer })
}

/// Answers of random parts in random order, cut at random.
#[test]
fn random_cuts_of_random_answers_change_nothing() {
    const BITS: [&str; 30] = [
        START,
        END,
        MESSAGE,
        CHANNEL,
        CONSTRAIN,
        RETURN,
        CALL,
        "assistant",
        "analysis",
        "commentary",
        "final",
        " to=functions.f",
        " to=functions.",
        "to=python",
        "json",
        " ",
        "\n",
        "<",
        "<|",
        "|>",
        "é",
        "Hello, world",
        "{",
        "}",
        "{\"a\": \"b\"}",
        "t",
        "assist",
        "<|mess",
        "user",
        "long ",
    ];
    const MESSAGES: [&str; 7] = [
        "<|channel|>analysis<|message|>So é.<|end|>",
        "<|channel|>final<|message|>Hello <b><|return|>",
        "<|channel|>final <|constrain|>json<|message|>{\"a\": 1}<|return|>",
        "<|channel|>commentary<|message|>I look.<|end|>",
        "<|channel|>commentary to=functions.f <|constrain|>json<|message|>{\"a\": \"}\"}<|call|>",
        " to=functions.g<|channel|>commentary json<|message|>{}<|call|>",
        "<|channel|>commentary to=functions.h<|message|>no object<|call|>",
    ];
    let seed: u64 = std::env::var("KVIST_SEED").ok().and_then(|s| s.parse().ok()).unwrap_or(7);
    let mut numbers = kvist_testing::reference::SplitMix64(seed);
    let mut below = |n: usize| numbers.index(n);
    let (mut known, mut calls) = (0, 0);
    for round in 0..20_000 {
        let text: String = match below(3) {
            0 => (0..=below(4)).map(|_| MESSAGES[below(7)]).collect::<Vec<_>>().join("<|start|>assistant"),
            1 => (0..below(14)).map(|_| BITS[below(30)]).collect(),
            // Headers longer than the limit.
            _ => (0..below(6)).map(|_| BITS[below(30)].repeat(1 + below(2) * below(200))).collect(),
        };
        let whole = Answer::read(&text, true);
        calls += whole.calls.len();
        if let Some(expected) = twin(&text) {
            known += 1;
            assert_eq!(whole, expected, "seed {seed}, round {round}: {text:?}");
        }
        let mut pieces = Vec::new();
        let mut rest = text.as_str();
        while !rest.is_empty() {
            let ends: Vec<usize> = rest.char_indices().take(40).map(|(at, c)| at + c.len_utf8()).collect();
            let (piece, after) = rest.split_at(ends[below(ends.len())]);
            pieces.push(piece);
            rest = after;
        }
        assert_eq!(cut(&pieces, true), whole, "seed {seed}, round {round}: {text:?} as {pieces:?}");
        // Without a mark of a header all text is content, unchanged.
        let words = ["to=", "assistant"];
        if !MARKS.iter().chain(&words).any(|mark| text.contains(mark)) {
            assert_eq!(whole.content, text, "seed {seed}, round {round}");
        }
    }
    assert!(known > 5_000 && calls > 2_000, "{known} known, {calls} calls");
}

#[test]
fn text_is_told_as_it_comes() {
    let (mut parser, mut out) = (ChannelParser::new(true), Vec::new());
    let mut push = |piece: &str| {
        parser.push(piece, &mut out);
        std::mem::take(&mut out)
    };
    let (content, reasoning) =
        (|text: &str| [Delta::Content(text.into())], |text: &str| [Delta::Reasoning(text.into())]);
    assert_eq!(push("<|channel|>"), []);
    assert_eq!(push("analysis"), []);
    assert_eq!(push("<|message|>"), []);
    assert_eq!(push("I <"), reasoning("I "));
    assert_eq!(push("think<|"), reasoning("<think"));
    assert_eq!(push("end|>"), []);
    assert_eq!(push("<|start|>assistant<|channel|>final<|message|>So"), content("So"));
    assert_eq!(push("."), content("."));
    assert_eq!(push("<|end|><|start|>assistant<|channel|>commentary to=functions.f<|message|>{"), []);
    assert_eq!(push("}"), []);
    assert_eq!(push("<|call|>"), [Delta::Call { name: "f".into(), arguments: "{}".into() }]);
    // Text that cannot be a header is not held back.
    assert_eq!(push("We"), content("\nWe"));
}

/// No model output makes the parser buffer more than the maximum size of a call.
#[test]
fn what_is_held_is_bounded() {
    let (mut parser, mut out) = (ChannelParser::new(true), Vec::new());
    let mut told = 0;
    let mut push = |parser: &mut ChannelParser, piece: &str| {
        parser.push(piece, &mut out);
        told +=
            out.drain(..).map(|d| if let Delta::Content(text) = d { text.len() } else { 0 }).sum::<usize>();
        let pending = parser.pending.len()
            + parser.header.len()
            + parser.call.as_ref().map_or(0, |call| call.body.len());
        assert!(pending <= MAX_CALL + MAX_HEADER + CONSTRAIN.len(), "{pending}");
    };
    let piece = "a".repeat(4096);
    push(&mut parser, "<|start|>");
    (0..100).for_each(|_| push(&mut parser, &piece));
    push(&mut parser, "<|end|>");
    (0..1000).for_each(|_| push(&mut parser, CONSTRAIN));
    push(&mut parser, "<|start|>assistant<|channel|>commentary to=functions.f<|message|>{");
    (0..2000).for_each(|_| push(&mut parser, &piece));
    assert!(told > 2100 * piece.len(), "{told}");
}

#[test]
fn ends_are_those_of_the_format() {
    let added = |text: &str, id: usize| {
        serde_json::json!({"id": id, "content": text, "single_word": false, "lstrip": false,
        "rstrip": false, "normalized": false, "special": true})
    };
    let tokenizer = |marks: &[&str]| {
        let added: Vec<_> = marks.iter().zip(2..).map(|(mark, id)| added(mark, id)).collect();
        let json = serde_json::json!({"version": "1.0", "truncation": null, "padding": null, "added_tokens": added,
            "normalizer": null, "pre_tokenizer": null, "post_processor": null, "decoder": null, "model": {"type": "BPE",
            "dropout": null, "unk_token": null, "continuing_subword_prefix": null, "end_of_word_suffix": null,
            "fuse_unk": false, "byte_fallback": false, "vocab": {"a": 0, "b": 1}, "merges": []}});
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("tokenizer.json"), json.to_string()).unwrap();
        Tokenizer::from_folder(folder.path()).unwrap().unwrap()
    };
    let harmony = tokenizer(&MARKS);
    let id = |mark| harmony.token(mark).unwrap();
    // A file that lists the end of a message as an end token, and not that of a call.
    let mut ends = vec![1, id(END), id(RETURN)];
    correct_ends(&harmony, &mut ends);
    assert_eq!(ends, [1, id(RETURN), id(RETURN), id(CALL)]);
    let other = tokenizer(&[END, CALL, RETURN]);
    let mut ends = vec![other.token(END).unwrap()];
    correct_ends(&other, &mut ends);
    assert_eq!(ends, [other.token(END).unwrap()]);
    let writes = ChatTemplate::new("t", "<|start|>assistant<|channel|>final<|message|>").unwrap();
    let plain = ChatTemplate::new("t", "<|start|>assistant").unwrap();
    assert_eq!(marks(&harmony, &writes).map(|marks| marks.len()), Some(7));
    assert_eq!(marks(&harmony, &plain), None);
    assert_eq!(marks(&other, &writes), None);
}
