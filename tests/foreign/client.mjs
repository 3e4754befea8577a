// A Tokenyard client in another language, written from docs/protocol.md: XADD and XREAD alone.
//
//     node client.mjs REDIS_URL YARD < requests.jsonl > answers.jsonl
//
// Each line of input holds the fields of one request; `packed` is an array of token ids to be sent
// as little-endian int32. Each line of output is {id, status, tokens, text, error, deltas}, in the
// order of the input. Exits with 1 when an answer takes longer than a minute or a stream of deltas
// does not add up to its result.

import { createInterface } from "node:readline";
import { createClient, RESP_TYPES } from "redis";

const ANSWER_WITHIN_MS = 60_000;
const [url, yard] = process.argv.slice(2);
const key = (rest) => `tokenyard:{${yard}}:${rest}`;

function packTokens(ids) {
  const packed = Buffer.alloc(4 * ids.length);
  ids.forEach((id, at) => packed.writeInt32LE(id, 4 * at));
  return packed;
}

function unpackTokens(packed) {
  return Array.from({ length: packed.length / 4 }, (_, at) => packed.readInt32LE(4 * at));
}

async function submit(redis, { packed, ...request }) {
  const fields = { client: "foreign", ...request };
  if (packed) fields.tokens = packTokens(packed);
  await redis.xAdd(key("intake:normal"), "*", fields);
}

async function* replies(redis, id) {
  const until = Date.now() + ANSWER_WITHIN_MS;
  let last = "0";
  while (Date.now() < until) {
    const answer = await redis.xRead({ key: key(`reply:foreign/${id}`), id: last }, { BLOCK: 1000 });
    for (const { id: entry, message } of answer?.[0].messages ?? []) {
      last = entry.toString();
      yield message;
      if (message.event.toString() === "result") return;
    }
  }
  throw new Error(`${id}: no result within ${ANSWER_WITHIN_MS} ms`);
}

async function answer(redis, id) {
  let streamed = [];
  let deltas = 0;
  for await (const reply of replies(redis, id)) {
    const tokens = unpackTokens(reply.tokens);
    const seq = Number(reply.seq);
    if (seq !== streamed.length) throw new Error(`${id}: seq ${seq} after ${streamed.length}`);
    if (reply.event.toString() === "delta") {
      streamed = streamed.concat(tokens);
      deltas += 1;
      continue;
    }
    if (streamed.some((token, at) => token !== tokens[at])) throw new Error(`${id}: deltas differ`);
    return {
      id,
      status: reply.status.toString(),
      tokens,
      text: reply.text?.toString(),
      error: reply.error && JSON.parse(reply.error),
      deltas,
    };
  }
}

async function readRequests() {
  const requests = [];
  for await (const line of createInterface({ input: process.stdin })) requests.push(JSON.parse(line));
  return requests;
}

const plain = createClient({ url });
await plain.connect();
if ((await plain.hGet(key("info"), "protocol")) !== "1") throw new Error("this client speaks 1");
const redis = plain.withTypeMapping({ [RESP_TYPES.BLOB_STRING]: Buffer });
const requests = await readRequests();
for (const request of requests) await submit(redis, request);
for (const { id } of requests) console.log(JSON.stringify(await answer(redis, id)));
plain.destroy();
