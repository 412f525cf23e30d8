// Carries out requests with RocketMQ's official Node client: JSON lines on stdin, JSON lines on stdout.
//
// Each request has an id, the name of a function of `requests`, and arguments. Requests run at the same time, and each
// answer has the request's id. The program ends at once when stdin ends.
'use strict';

const readline = require('node:readline');
const folder = process.argv[2]; // has the folder node_modules
const { createRequire } = require('node:module');
const load = createRequire(`${folder}/package.json`);
const { Producer, SimpleConsumer, PushConsumer, ConsumeResult, FilterExpression } = load('rocketmq-client-nodejs');
const { FilterType, TransactionResolution } = load('rocketmq-client-nodejs/proto/apache/rocketmq/v2/definition_pb');

const REQUEST_TIMEOUT_MS = 10000;
const BODY_SHOWN = 100;
const LONG_POLL_S = 2;

const clients = new Map();
const recorded = new Map();
const received = new Map();
const listeners = new Map();
const transactions = new Map();
const loads = new Map();
const log = (...parts) => process.stderr.write(`${parts.map(String).join(' ')}\n`);
const logger = { debug() {}, info() {}, warn: log, error: log };
const pause = seconds => new Promise(resolve => setTimeout(resolve, seconds * 1000));

process.on('uncaughtException', error => log('uncaught', error.stack));
process.on('unhandledRejection', error => log('unhandled', error && error.stack));

function options({ endpoints, credentials = [], tls = false, namespace = '' }) {
  const place = { endpoints, namespace, sslEnabled: tls, logger, requestTimeout: REQUEST_TIMEOUT_MS };
  if (credentials.length) place.sessionCredentials = { accessKey: credentials[0], accessSecret: credentials[1] };
  return place;
}

async function started(name, client, records = []) {
  await client.startup();
  clients.set(name, client);
  recorded.set(name, records);
}

// Returns a message as the client takes it. `times`: how often the text `body` is repeated.
function made({ topic, body, tag, key, properties, group, deliver_at_s, times = 1 }) {
  const message = { topic, body: Buffer.from(body.repeat(times)) };
  if (tag !== undefined) message.tag = tag;
  if (key !== undefined) message.keys = [key];
  if (properties !== undefined) message.properties = new Map(Object.entries(properties));
  if (group !== undefined) message.messageGroup = group;
  if (deliver_at_s !== undefined) message.deliveryTimestamp = new Date(deliver_at_s * 1000);
  return message;
}

// Returns what a request answers about a received message.
function shown(message) {
  return {
    id: message.messageId,
    topic: message.topic,
    body: message.body.subarray(0, BODY_SHOWN).toString(),
    size: message.body.length,
    tag: message.tag || null,
    keys: [...message.keys].sort(),
    properties: Object.fromEntries(message.properties),
    group: message.messageGroup || null,
    attempt: message.deliveryAttempt,
    handle: message.receiptHandle,
    corrupted: message.corrupted === true,
    at_ms: Date.now(),
  };
}

const requests = {
  // `outcome`: the answer to each question about a transaction.
  async open_producer({ name, topics, outcome = 'COMMIT', ...place }) {
    const records = [];
    const checker = {
      async check(message) {
        records.push(message.body.toString());
        return TransactionResolution[outcome];
      },
    };
    await started(name, new Producer({ ...options(place), topics, checker }), records);
  },

  // `wait_s`: how long a receive waits for a message.
  async open_simple({ name, group, topic, expression = '*', sql = false, wait_s = LONG_POLL_S, ...place }) {
    const filter = new FilterExpression(expression, sql ? FilterType.SQL : FilterType.TAG);
    const subscriptions = new Map().set(topic, filter);
    const wanted = { consumerGroup: group, subscriptions, awaitDuration: wait_s * 1000 };
    await started(name, new SimpleConsumer({ ...options(place), ...wanted }));
  },

  // The listener fails while a message has at most `failures` attempts. It holds each message until `release`, at most
  // for `hold_s`.
  async open_push({ name, group, topic, failures = 0, hold_s = 0, ...place }) {
    const records = [];
    const released = new Promise(resolve => listeners.set(name, resolve));
    const messageListener = {
      async consume(message) {
        records.push(shown(message));
        if (hold_s > 0) await Promise.race([released, pause(hold_s)]);
        return message.deliveryAttempt <= failures ? ConsumeResult.FAILURE : ConsumeResult.SUCCESS;
      },
    };
    const subscriptions = new Map().set(topic, '*');
    await started(name, new PushConsumer({ ...options(place), consumerGroup: group, subscriptions, messageListener }), records);
  },

  // Lets the listener of a push consumer hold messages no longer.
  async release({ name }) {
    listeners.get(name)();
  },

  // Returns what a push consumer has consumed, or which transactions a producer was asked about.
  async records({ name }) {
    return recorded.get(name);
  },

  // Sends messages one after another. Returns their ids and recall handles.
  async send({ name, messages }) {
    const receipts = [];
    for (const fields of messages) {
      const one = await clients.get(name).send(made(fields));
      receipts.push({ id: one.messageId, recall: one.recallHandle });
    }
    return receipts;
  },

  // Sends a message in a transaction, and returns its id. `end`: commit, rollback, or null to leave the transaction open.
  async transact({ name, message, end = null }) {
    const transaction = clients.get(name).beginTransaction();
    const receipt = await clients.get(name).send(made(message), transaction);
    transactions.set(receipt.messageId, transaction);
    if (end !== null) await transaction[end]();
    return receipt.messageId;
  },

  // Ends the open transaction of a message.
  async end_transaction({ message_id, end }) {
    await transactions.get(message_id)[end]();
  },

  async recall({ name, topic, handle }) {
    return (await clients.get(name).recallMessage(topic, handle)).messageId;
  },

  async receive({ name, count = 32, invisible_s = 60 }) {
    const messages = await clients.get(name).receive(count, invisible_s * 1000);
    for (const one of messages) received.set(one.receiptHandle, one);
    return messages.map(shown);
  },

  // Acknowledges the message with a handle. `other`: the text to send as its handle.
  async ack({ name, handle, other }) {
    const message = received.get(handle);
    if (other !== undefined) message.receiptHandle = other;
    await clients.get(name).ack(message);
  },

  // Changes the invisible time of a message. Returns its handle after the call.
  async change_invisible({ name, handle, seconds }) {
    const message = received.get(handle);
    await clients.get(name).changeInvisibleDuration(message, seconds * 1000);
    received.set(message.receiptHandle, message);
    return message.receiptHandle;
  },

  // Sends messages in the background until `end_load`, one after another, each with a text of its own. `groups`: the
  // number of message groups, which send at the same time. The text of a message is then the group's number, a colon, and
  // the message's number in the group.
  async start_load({ name, topic, prefix, pause_s, groups = 0 }) {
    const one = { stopped: false, sent: [], failed: [], counts: Array(Math.max(groups, 1)).fill(0) };
    const run = async index => {
      for (let number = 0; !one.stopped; number++) {
        await pause(pause_s);
        const body = groups ? `${index}:${number}` : `${prefix}-${number}`;
        const group = groups ? `${prefix}-${index}` : undefined;
        const begin = Date.now();
        try {
          await clients.get(name).send(made({ topic, body, group }));
          one.sent.push([body, begin, Date.now()]);
          one.counts[index]++;
        } catch (error) {
          one.failed.push([body, begin, Date.now(), String(error)]);
        }
      }
    };
    one.running = Promise.all(one.counts.map((_, index) => run(index)));
    loads.set(name, one);
  },

  // Returns how many messages of a load have been sent, for each message group.
  async load_counts({ name }) {
    return loads.get(name).counts;
  },

  async end_load({ name }) {
    const one = loads.get(name);
    one.stopped = true;
    await one.running;
    return { sent: one.sent, failed: one.failed, ended: true };
  },
};

async function answer(number, name, fields) {
  let text;
  try {
    text = { result: (await requests[name](fields)) ?? null };
  } catch (error) {
    const cause = error.cause?.cause ?? error.cause ?? error;
    text = { error: cause.constructor.name, code: cause.code ?? null, text: `${error.message}` };
  }
  process.stdout.write(`${JSON.stringify({ id: number, ...text })}\n`);
}

readline
  .createInterface({ input: process.stdin })
  .on('line', line => answer(...JSON.parse(line)))
  .on('close', () => process.exit(0));
